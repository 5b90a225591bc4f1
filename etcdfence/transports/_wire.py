"""Requests to protobuf messages and back; pure."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

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
)
from etcdfence.transports._pb import etcdfence_wire_pb2 as pb

_TARGET = {target: getattr(pb.Compare, target.value) for target in Target}
_SORT = {
    Order.CREATE_ASCENDING: (pb.RangeRequest.ASCEND, pb.RangeRequest.CREATE),
    Order.CREATE_DESCENDING: (pb.RangeRequest.DESCEND, pb.RangeRequest.CREATE),
}


def txn_bytes(txn: Txn) -> bytes:
    """The TxnRequest on the wire.

    The success branch is filled in place, because building each part and handing it to its parent costs three
    times as much. Guard and failure branch are the same in every write of a lease; their encodings are kept, and
    joined, which the encoding of repeated fields allows.
    """
    message = pb.TxnRequest()
    for operation in txn.success:
        _fill_operation(message.success.add(), operation)
    return b"".join((*map(_compare, txn.compares), message.SerializeToString(), _failure(txn.failure)))


@lru_cache(maxsize=4096)
def _compare(compare: Compare) -> bytes:
    message = pb.TxnRequest()
    _fill_compare(message.compare.add(), compare)
    return message.SerializeToString()


@lru_cache(maxsize=1024)
def _failure(operations: tuple[Operation, ...]) -> bytes:
    message = pb.TxnRequest()
    for operation in operations:
        _fill_operation(message.failure.add(), operation)
    return message.SerializeToString()


def _fill_compare(message: pb.Compare, compare: Compare) -> None:
    message.target = _TARGET[compare.target]
    message.key = compare.key
    if compare.range_end:
        message.range_end = compare.range_end
    match compare.target, compare.operand:
        case Target.VALUE, bytes(value):
            message.value = value
        case Target.MOD, int(number):
            message.mod_revision = number
        case Target.CREATE, int(number):
            message.create_revision = number
        case Target.VERSION, int(number):
            message.version = number
        case Target.LEASE, int(number):
            message.lease = number
        case _:
            raise TypeError(f"{compare.target} does not compare with {compare.operand!r}")


def _fill_operation(message: pb.RequestOp, operation: Operation) -> None:
    if isinstance(operation, Put):
        put = message.request_put
        put.key, put.value = operation.key, operation.value
        if operation.lease:
            put.lease = operation.lease
    elif isinstance(operation, Delete):
        message.request_delete_range.key = operation.key
        if operation.range_end:
            message.request_delete_range.range_end = operation.range_end
    else:
        _fill_range(message.request_range, operation)


def _fill_range(message: pb.RangeRequest, request: Range) -> None:
    message.key = request.key
    if request.range_end:
        message.range_end, message.limit = request.range_end, request.limit
    if request.keys_only:
        message.keys_only = True
    if request.count_only:
        message.count_only = True
    if request.order in _SORT:
        message.sort_order, message.sort_target = _SORT[request.order]
    if request.max_create:
        message.max_create_revision = request.max_create


def txn_reply(txn: Txn, message: pb.TxnResponse) -> TxnReply:
    branch = txn.success if message.succeeded else txn.failure
    asked = any(isinstance(operation, Range) for operation in branch)
    reads = tuple(_reads(message.responses)) if asked else ()
    return TxnReply(header(message.header), message.succeeded, reads)


def _reads(responses: Iterable[pb.ResponseOp]) -> Iterable[RangeReply]:
    for response in responses:
        if response.HasField("response_range"):
            found = response.response_range
            yield RangeReply(tuple(map(key_value, found.kvs)), found.count)


def header(message: pb.ResponseHeader) -> Header:
    return Header(message.cluster_id, message.revision)


def key_value(message: pb.KeyValue) -> KeyValue:
    return KeyValue(
        key=message.key,
        value=message.value,
        create_revision=message.create_revision,
        mod_revision=message.mod_revision,
        version=message.version,
        lease=message.lease,
    )
