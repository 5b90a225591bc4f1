"""What both gRPC transports share: the members of a cluster, their methods, and what each request is on the wire.

A request goes to one member and is never repeated here; when a member fails, the next request (a flow's own
repetition, for one) goes to another. gRPC's own retries are off for the same reason: they cannot know that a
transaction may not be sent twice. Every request has a time limit and asks etcd to refuse it at once while
there is no leader.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc

from etcdfence._requests import (
    Grant,
    GrantReply,
    KeepAlive,
    Request,
    Revoke,
    RevokeReply,
    TimeToLive,
    TimeToLiveReply,
    Txn,
    Wait,
    Waited,
)
from etcdfence.errors import Closed, EtcdFenceError, Misuse, OutcomeUnknown, Unavailable
from etcdfence.model import MemberStatus
from etcdfence.transports import _wire
from etcdfence.transports._pb import etcdfence_wire_pb2 as pb
from etcdfence.transports.codes import error_for
from etcdfence.transports.endpoints import host_and_port

METADATA: Final = (("hasleader", "true"),)
OPTIONS: Final = (
    ("grpc.enable_retries", 0),
    ("grpc.service_config_disable_resolution", 1),
    ("grpc.enable_http_proxy", 0),  # http_proxy and its like hijack loopback connections
    ("grpc.max_receive_message_length", -1),  # the default of 4 MiB is less than etcd may answer
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 10_000),  # etcd refuses pings more often than every 5 s
    ("grpc.keepalive_timeout_ms", 5_000),
)


class Member:
    """One endpoint's channel and its methods. Paths are etcd's, messages our own (see the .proto). `open_channel`
    is gRPC's for one colour or the other; their stubs are made alike."""

    def __init__(self, endpoint: str, open_channel: Callable[..., Any]) -> None:
        self.endpoint = endpoint
        self.channel: Any = open_channel(f"dns:///{host_and_port(endpoint)}", options=OPTIONS)
        self.txn = self._unary("KV/Txn", None, pb.TxnResponse)
        self.grant = self._unary("Lease/LeaseGrant", pb.LeaseGrantRequest, pb.LeaseGrantResponse)
        self.revoke = self._unary("Lease/LeaseRevoke", pb.LeaseRevokeRequest, pb.LeaseRevokeResponse)
        self.time_to_live = self._unary(
            "Lease/LeaseTimeToLive", pb.LeaseTimeToLiveRequest, pb.LeaseTimeToLiveResponse
        )
        self.status = self._unary("Maintenance/Status", pb.StatusRequest, pb.StatusResponse)
        self.keep_alive = self.channel.stream_stream(
            "/etcdserverpb.Lease/LeaseKeepAlive",
            request_serializer=pb.LeaseKeepAliveRequest.SerializeToString,
            response_deserializer=pb.LeaseKeepAliveResponse.FromString,
        )
        # One message and then only listening: etcd keeps a watch open after the client's half is closed.
        self.watch = self.channel.unary_stream(
            "/etcdserverpb.Watch/Watch",
            request_serializer=pb.WatchRequest.SerializeToString,
            response_deserializer=pb.WatchResponse.FromString,
        )

    def _unary(self, path: str, request: Any, response: Any) -> Any:
        return self.channel.unary_unary(
            f"/etcdserverpb.{path}",
            request_serializer=request and request.SerializeToString,  # None: bytes already
            response_deserializer=response.FromString,
        )


class Members:
    """The members of one cluster, one of which is asked at a time."""

    def __init__(self, endpoints: Sequence[str], open_channel: Callable[..., Any]) -> None:
        if not endpoints:
            raise Misuse("at least one endpoint is needed, such as http://127.0.0.1:2379")
        self.all = [Member(endpoint, open_channel) for endpoint in endpoints]
        self._at = 0
        self._lock = threading.Lock()

    @property
    def current(self) -> Member:
        return self.all[self._at]

    def move_from(self, member: Member) -> None:
        """Let the next request go to the member after this one, unless another caller has moved on already."""
        with self._lock:
            if self.all[self._at] is member:
                self._at = (self._at + 1) % len(self.all)

    def failed(self, member: Member, error: grpc.RpcError | ValueError) -> EtcdFenceError:
        """What gRPC's error means; ValueError is a channel that was closed while we held it."""
        if isinstance(error, ValueError):
            return OutcomeUnknown(f"{member.endpoint}: the connection was closed: {error}")
        failure = error_for(error.code().name, error.details() or "", member.endpoint)
        if isinstance(failure, Unavailable | OutcomeUnknown):
            self.move_from(member)
        return failure


@dataclass(frozen=True, slots=True)
class Unary:
    """One kind of request: the member's method, the message to send, and the reply in the message received."""

    method: Callable[[Member], Any]
    message: Callable[[Any], Any]
    reply: Callable[[Any, Any], Any]


UNARY: Final[dict[type[Request[Any]], Unary]] = {
    Txn: Unary(lambda member: member.txn, _wire.txn_bytes, _wire.txn_reply),
    Grant: Unary(
        lambda member: member.grant,
        lambda request: pb.LeaseGrantRequest(ID=request.lease_id, TTL=request.ttl),
        lambda _, message: GrantReply(message.TTL),
    ),
    Revoke: Unary(
        lambda member: member.revoke,
        lambda request: pb.LeaseRevokeRequest(ID=request.lease_id),
        lambda _, _message: RevokeReply(found=True),  # else the answer is an error
    ),
    TimeToLive: Unary(
        lambda member: member.time_to_live,
        lambda request: pb.LeaseTimeToLiveRequest(ID=request.lease_id),
        lambda _, message: TimeToLiveReply(message.TTL, message.grantedTTL),
    ),
}


def keep_alive_messages(request: KeepAlive) -> list[Any]:
    return [pb.LeaseKeepAliveRequest(ID=lease_id) for lease_id in request.lease_ids]


def watch_message(request: Wait) -> Any:
    create = pb.WatchCreateRequest(
        key=request.key,
        range_end=request.range_end,
        start_revision=request.from_revision,
        filters=[] if request.puts else [pb.WatchCreateRequest.NOPUT],
    )
    return pb.WatchRequest(create_request=create)


def word_of(response: Any) -> Waited | None:
    """What a message of a watch says; None where it says nothing yet."""
    if response.compact_revision:
        return Waited.COMPACTED
    if response.canceled:
        raise Unavailable(f"etcd ended the watch: {response.cancel_reason or 'no reason given'}")
    return Waited.WOKEN if response.events else None


def out_of_time(error: grpc.RpcError) -> bool:
    """The time limit of a stream travels with it; whether client or server notices first is a matter of luck, and
    the server says it as UNKNOWN, or by resetting the stream."""
    details = error.details() or ""
    by_server = error.code() is grpc.StatusCode.UNKNOWN and "context deadline exceeded" in details
    by_reset = error.code() is grpc.StatusCode.CANCELLED and "RST_STREAM" in details
    return by_server or by_reset or error.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def status_of(member: Member, reply: Any) -> MemberStatus:
    return MemberStatus(
        endpoint=member.endpoint,
        version=reply.version,
        leader=reply.leader == reply.header.member_id,
        db_size=reply.dbSize,
        revision=reply.header.revision,
        cluster_id=reply.header.cluster_id,
        member_id=reply.header.member_id,
        alarms=tuple(reply.errors),
    )


def status_failed(member: Member, error: grpc.RpcError | ValueError) -> MemberStatus:
    if isinstance(error, ValueError):
        raise Closed("this coordinator was closed meanwhile") from error
    return MemberStatus(member.endpoint, error=f"{error.code().name}: {error.details()}")


def shorter(within: float, own: float | None) -> float:
    return within if own is None else min(within, own)
