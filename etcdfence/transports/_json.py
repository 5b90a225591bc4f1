"""Requests to the JSON of etcd's gateway and back; pure.

Bytes are base64, 64-bit numbers are text, and what is zero, false or empty is left out of replies. The gateway
ignores fields that it does not know, so a misspelt comparison would compare with zero: documents are built from
the closed vocabulary here and nowhere else, and a connection begins with transactions that must fail.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator
from typing import Any, Final

from etcdfence._requests import (
    Compare,
    Delete,
    Header,
    KeyValue,
    Operation,
    Order,
    Put,
    Range,
    RangeReply,
    Target,
    Txn,
    TxnReply,
    WaitGone,
)

Document = dict[str, Any]
_OPERANDS: Final = {
    Target.CREATE: "create_revision",
    Target.MOD: "mod_revision",
    Target.VERSION: "version",
    Target.LEASE: "lease",
}
_SORT: Final = {Order.CREATE_ASCENDING: "ASCEND", Order.CREATE_DESCENDING: "DESCEND"}


def text(data: bytes) -> str:
    return b64encode(data).decode("ascii")


def txn(request: Txn) -> Document:
    return {
        "compare": [_compare(one) for one in request.compares],
        "success": [_operation(one) for one in request.success],
        "failure": [_operation(one) for one in request.failure],
    }


def _compare(compare: Compare) -> Document:
    document: Document = {"result": "EQUAL", "target": compare.target.value, "key": text(compare.key)}
    if compare.range_end:
        document["range_end"] = text(compare.range_end)
    if isinstance(compare.operand, bytes):
        document["value"] = text(compare.operand)
    else:
        document[_OPERANDS[compare.target]] = str(compare.operand)
    return document


def _operation(operation: Operation) -> Document:
    if isinstance(operation, Put):
        put = {"key": text(operation.key), "value": text(operation.value)}
        return {"request_put": put | ({"lease": str(operation.lease)} if operation.lease else {})}
    if isinstance(operation, Delete):
        return {"request_delete_range": _keys(operation)}
    return {"request_range": _range(operation)}


def _keys(operation: Delete | Range) -> Document:
    document = {"key": text(operation.key)}
    return document | ({"range_end": text(operation.range_end)} if operation.range_end else {})


def _range(request: Range) -> Document:
    document = _keys(request)
    if request.limit:
        document["limit"] = str(request.limit)
    if request.order in _SORT:
        document |= {"sort_order": _SORT[request.order], "sort_target": "CREATE"}
    return document | {name: True for name in ("keys_only", "count_only") if getattr(request, name)}


def txn_reply(document: Document) -> TxnReply:
    return TxnReply(
        header(document), document.get("succeeded", False), tuple(_reads(document.get("responses", ())))
    )


def _reads(responses: Iterable[Document]) -> Iterator[RangeReply]:
    for response in responses:
        found = response.get("response_range")
        if found is not None:
            yield RangeReply(tuple(map(_key_value, found.get("kvs", ()))), int(found.get("count", 0)))


def header(document: Document) -> Header:
    found = document.get("header", {})
    return Header(int(found.get("cluster_id", 0)), int(found.get("revision", 0)))


def _key_value(document: Document) -> KeyValue:
    return KeyValue(
        key=b64decode(document.get("key", "")),
        value=b64decode(document.get("value", "")),
        create_revision=int(document.get("create_revision", 0)),
        mod_revision=int(document.get("mod_revision", 0)),
        version=int(document.get("version", 0)),
        lease=int(document.get("lease", 0)),
    )


def watch(request: WaitGone) -> Document:
    return {
        "create_request": {
            "key": text(request.key),
            "start_revision": str(request.from_revision),
            "filters": ["NOPUT"],
        }
    }


def documents(chunks: Iterable[bytes]) -> Iterator[Document]:
    """The documents of a stream, which the gateway ends with a newline each; a chunk may hold several, or end
    anywhere inside one."""
    rest = b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        yield from (json.loads(line) for line in whole if line.strip())
    if rest.strip():
        yield json.loads(rest)
