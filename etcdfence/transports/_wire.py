"""Requests to protobuf messages and back; pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

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

_OPERAND = {
    Target.VERSION: "version",
    Target.CREATE: "create_revision",
    Target.MOD: "mod_revision",
    Target.VALUE: "value",
    Target.LEASE: "lease",
}
_TARGET = {target: pb.Compare.CompareTarget.Value(target.value) for target in Target}
_SORT: dict[Order, dict[str, Any]] = {
    Order.KEY: {},
    Order.CREATE_ASCENDING: {"sort_order": pb.RangeRequest.ASCEND, "sort_target": pb.RangeRequest.CREATE},
    Order.CREATE_DESCENDING: {"sort_order": pb.RangeRequest.DESCEND, "sort_target": pb.RangeRequest.CREATE},
}


def compare_message(compare: Compare) -> pb.Compare:
    message = pb.Compare(
        result=pb.Compare.EQUAL,
        target=_TARGET[compare.target],
        key=compare.key,
        range_end=compare.range_end,
    )
    setattr(message, _OPERAND[compare.target], compare.operand)
    return message


def range_message(request: Range) -> pb.RangeRequest:
    return pb.RangeRequest(
        key=request.key,
        range_end=request.range_end,
        limit=request.limit,
        keys_only=request.keys_only,
        count_only=request.count_only,
        **_SORT[request.order],
    )


def operation_message(operation: Operation) -> pb.RequestOp:
    match operation:
        case Put(key, value, lease):
            return pb.RequestOp(request_put=pb.PutRequest(key=key, value=value, lease=lease))
        case Delete(key):
            return pb.RequestOp(request_delete_range=pb.DeleteRangeRequest(key=key))
        case Range():
            return pb.RequestOp(request_range=range_message(operation))


def txn_message(txn: Txn) -> pb.TxnRequest:
    return pb.TxnRequest(
        compare=map(compare_message, txn.compares),
        success=map(operation_message, txn.success),
        failure=map(operation_message, txn.failure),
    )


def txn_reply(message: pb.TxnResponse) -> TxnReply:
    return TxnReply(header(message.header), message.succeeded, tuple(_reads(message.responses)))


def _reads(responses: Iterable[pb.ResponseOp]) -> Iterable[RangeReply]:
    for response in responses:
        if response.HasField("response_range"):
            found = response.response_range
            yield RangeReply(tuple(map(key_value, found.kvs)), found.count)


def header(message: pb.ResponseHeader) -> Header:
    return Header(message.cluster_id, message.member_id, message.revision)


def key_value(message: pb.KeyValue) -> KeyValue:
    return KeyValue(
        key=message.key,
        value=message.value,
        create_revision=message.create_revision,
        mod_revision=message.mod_revision,
        lease=message.lease,
    )
