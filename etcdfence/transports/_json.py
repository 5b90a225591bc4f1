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
    TimeToLiveReply,
    Txn,
    TxnReply,
    Wait,
    Waited,
)
from etcdfence.errors import EtcdFenceError, Unavailable
from etcdfence.model import MemberStatus
from etcdfence.transports.codes import error_for

Document = dict[str, Any]
MAX_KEEPALIVE: Final = 500  # bytes
# The names of gRPC's status codes, by the numbers that the gateway's error documents have.
CODES: Final = (
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
)
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
    if request.max_create:
        document["max_create_revision"] = str(request.max_create)
    return document | {name: True for name in ("keys_only", "count_only") if getattr(request, name)}


class NotEtcds(ValueError):
    """A document that etcd would not have sent."""


# What reading an answer may raise that is not etcd's, whatever it is instead.
UNREADABLE: Final = (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError)


def answer(body: bytes) -> Document:
    """The document of an answer; every one of etcd's has a header with the id of its cluster."""
    document = json.loads(body)
    if not isinstance(document, dict) or not header(document).cluster_id:
        raise NotEtcds(f"{body[:200]!r}")
    return document


def txn_reply(request: Txn, document: Document) -> TxnReply:
    succeeded = document.get("succeeded", False)
    responses = document.get("responses", ())
    if len(responses) != len(request.success if succeeded else request.failure):
        raise NotEtcds(f"{len(responses)} responses do not answer {request}")
    return TxnReply(header(document), succeeded, tuple(_reads(responses)))


def time_to_live(document: Document) -> TimeToLiveReply:
    return TimeToLiveReply(int(document.get("TTL", 0)), int(document.get("grantedTTL", 0)))


def keep_alives(lease_ids: Iterable[int]) -> Iterator[str]:
    """Bodies of several documents each. When the gateway begins to answer it has read 512 bytes and throws away
    the rest: measured, seventeen of the longest ids (493 bytes) always came through, eighteen did not."""
    body = ""
    for lease_id in lease_ids:
        document = f'{{"ID":"{lease_id}"}}\n'
        if len(body) + len(document) > MAX_KEEPALIVE:
            yield body
            body = ""
        body += document
    if body:
        yield body


def renewed(body: bytes) -> dict[int, int]:
    """Seconds by lease id."""
    results = [result_of(document) for document in documents([body])]
    return {int(one.get("ID", 0)): int(one.get("TTL", 0)) for one in results}


def result_of(document: Document) -> Document:
    """The message in one document of a stream, or the error in its place."""
    if "error" in document:
        raise error_in(document, "the gateway")
    result = document["result"]
    if not isinstance(result, dict):
        raise NotEtcds(f"{document}")
    return result


def error_in(document: Document, endpoint: str) -> EtcdFenceError:
    """What an error document says; in a stream it comes in an envelope, with a number by another name."""
    inner = document["error"] if isinstance(document.get("error"), dict) else document
    code = inner["code"] if "code" in inner else inner["grpc_code"]
    if isinstance(code, bool) or not isinstance(code, int):
        raise NotEtcds(f"{document}")
    name = CODES[code] if 0 <= code < len(CODES) else "UNKNOWN"
    return error_for(name, str(inner.get("message") or inner.get("error") or ""), endpoint)


def first_word(stream: Iterable[Document]) -> Waited:
    """What a watch for one key's deletion says first."""
    for document in stream:
        result = result_of(document)
        if int(result.get("compact_revision", 0)):
            return Waited.COMPACTED
        if result.get("canceled"):
            raise Unavailable(f"etcd ended the watch: {result.get('cancel_reason') or 'no reason given'}")
        if result.get("events"):
            return Waited.WOKEN
    raise Unavailable("etcd ended the watch")


def status(endpoint: str, body: bytes) -> MemberStatus:
    found = answer(body)
    head = found["header"]
    return MemberStatus(
        endpoint=endpoint,
        version=found.get("version", ""),
        leader=found.get("leader") == head.get("member_id"),
        db_size=int(found.get("dbSize", 0)),
        revision=int(head.get("revision", 0)),
        cluster_id=int(head.get("cluster_id", 0)),
        member_id=int(head.get("member_id", 0)),
        alarms=tuple(found.get("errors", ())),
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


def watch(request: Wait) -> Document:
    create: Document = {"key": text(request.key), "start_revision": str(request.from_revision)}
    if request.range_end:
        create["range_end"] = text(request.range_end)
    if not request.puts:
        create["filters"] = ["NOPUT"]
    return {"create_request": create}


def documents(chunks: Iterable[bytes]) -> Iterator[Document]:
    """The documents of a stream, which the gateway ends with a newline each; a chunk may hold several, or end
    anywhere inside one."""
    rest = b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        yield from (json.loads(line) for line in whole if line.strip())
    if rest.strip():
        yield json.loads(rest)
