"""etcd over gRPC, synchronous.

A request goes to one member and is never repeated here; when a member fails, the next request (a flow's own
repetition, for one) goes to another. gRPC's own retries are off for the same reason: they cannot know that a
transaction may not be sent twice. Every request has a time limit and asks etcd to refuse it at once while
there is no leader.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

import grpc

from etcdfence._requests import (
    Grant,
    GrantReply,
    KeepAlive,
    KeepAliveReply,
    Members,
    Request,
    Revoke,
    RevokeReply,
    TimeToLive,
    TimeToLiveReply,
    Txn,
    TxnReply,
    Waited,
    WaitGone,
)
from etcdfence.errors import Closed, EtcdFenceError, LeaseNotFound, Misuse, OutcomeUnknown, Unavailable
from etcdfence.model import MemberStatus
from etcdfence.transports import _wire
from etcdfence.transports._pb import etcdfence_wire_pb2 as pb
from etcdfence.transports.codes import error_for
from etcdfence.transports.endpoints import host_and_port

T = TypeVar("T")
_METADATA = (("hasleader", "true"),)
_OPTIONS = (
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


class _Member:
    """One endpoint's channel and its methods. Paths are etcd's, messages our own (see the .proto)."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.channel = grpc.insecure_channel(f"dns:///{host_and_port(endpoint)}", options=_OPTIONS)
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

    def _unary(self, path: str, request: Any, response: Any) -> Callable[..., Any]:
        return cast(
            "Callable[..., Any]",
            self.channel.unary_unary(
                f"/etcdserverpb.{path}",
                request_serializer=request and request.SerializeToString,  # None: bytes already
                response_deserializer=response.FromString,
            ),
        )


class GrpcTransport:
    """The members of one etcd cluster, one of which is asked at a time."""

    def __init__(self, endpoints: Sequence[str]) -> None:
        if not endpoints:
            raise Misuse("at least one endpoint is needed, such as http://127.0.0.1:2379")
        self._members = [_Member(endpoint) for endpoint in endpoints]
        self._current = 0
        self._waits: set[Any] = set()
        self._lock = threading.RLock()  # a signal handler may close us in the middle of a call
        self._closed = self._interrupted = False
        self._handlers: dict[type[Request[Any]], Callable[[Any, float], Any]] = {
            Txn: self._txn,
            Grant: self._grant,
            Revoke: self._revoke,
            TimeToLive: self._time_to_live,
            KeepAlive: self._keep_alive,
            WaitGone: self._wait_gone,
            Members: self._members_status,
        }

    def call(self, request: Request[T], within: float) -> T:
        if self._closed:
            raise Closed("this coordinator is closed")
        return cast("T", self._handlers[type(request)](request, within))

    def interrupt(self) -> None:
        with self._lock:
            self._interrupted = True
            waits = list(self._waits)
        for wait in waits:
            wait.cancel()

    def close(self) -> None:
        """Cancel what is in flight (its callers see OutcomeUnknown) and close the connections."""
        self._closed = True
        self.interrupt()
        for member in self._members:
            member.channel.close()

    # --- requests ------------------------------------------------------------------------------------------

    def _txn(self, request: Txn, within: float) -> TxnReply:
        message = _wire.txn_bytes(request)
        if request.elsewhere:
            self._move_from(self._members[self._current])
        return _wire.txn_reply(
            request, self._ask(lambda member: member.txn, message, _shorter(within, request.timeout))
        )

    def _grant(self, request: Grant, within: float) -> GrantReply:
        message = pb.LeaseGrantRequest(ID=request.lease_id, TTL=request.ttl)
        return GrantReply(self._ask(lambda member: member.grant, message, within).TTL)

    def _revoke(self, request: Revoke, within: float) -> RevokeReply:
        try:
            self._ask(lambda member: member.revoke, pb.LeaseRevokeRequest(ID=request.lease_id), within)
        except LeaseNotFound:
            return RevokeReply(found=False)
        return RevokeReply(found=True)

    def _time_to_live(self, request: TimeToLive, within: float) -> TimeToLiveReply:
        message = pb.LeaseTimeToLiveRequest(ID=request.lease_id)
        reply = self._ask(lambda member: member.time_to_live, message, _shorter(within, request.timeout))
        return TimeToLiveReply(reply.TTL, reply.grantedTTL)

    def _ask(self, method: Callable[[_Member], Any], message: Any, timeout: float) -> Any:
        member = self._members[self._current]
        try:
            return method(member)(message, timeout=timeout, metadata=_METADATA)
        except grpc.RpcError as error:
            raise self._failed(member, error) from error
        except ValueError as error:  # a channel that was closed while we held it
            raise OutcomeUnknown(f"{member.endpoint}: the connection was closed: {error}") from error

    def _keep_alive(self, request: KeepAlive, within: float) -> KeepAliveReply:
        """One exchange on one stream: all requests, then the end of our half; etcd answers each and ends."""
        member = self._members[self._current]
        messages = iter([pb.LeaseKeepAliveRequest(ID=lease_id) for lease_id in request.lease_ids])
        try:
            replies = member.keep_alive(messages, timeout=_shorter(within, request.timeout), metadata=_METADATA)
            return KeepAliveReply({reply.ID: reply.TTL for reply in replies})
        except grpc.RpcError as error:
            raise self._failed(member, error) from error
        except ValueError as error:
            raise OutcomeUnknown(f"{member.endpoint}: the connection was closed: {error}") from error

    def _wait_gone(self, request: WaitGone, _within: float) -> Waited:
        member = self._members[self._current]
        create = pb.WatchCreateRequest(
            key=request.key, start_revision=request.from_revision, filters=[pb.WatchCreateRequest.NOPUT]
        )
        try:
            stream = member.watch(
                pb.WatchRequest(create_request=create), timeout=request.timeout, metadata=_METADATA
            )
        except ValueError as error:
            raise Closed("this coordinator is closed") from error
        try:
            with self._lock:
                self._waits.add(stream)
            if self._interrupted:
                raise Closed("this coordinator is being closed")
            return _first_word(stream)
        except grpc.RpcError as error:
            if _out_of_time(error):
                return Waited.TIMED_OUT
            if self._interrupted:
                raise Closed("this coordinator was closed while waiting") from error
            raise self._failed(member, error) from error
        finally:
            stream.cancel()
            with self._lock:
                self._waits.discard(stream)

    def _members_status(self, request: Members, within: float) -> tuple[MemberStatus, ...]:
        return tuple(self._status(member, _shorter(within, request.timeout)) for member in self._members)

    def _status(self, member: _Member, timeout: float) -> MemberStatus:
        try:
            reply = member.status(pb.StatusRequest(), timeout=timeout)
        except grpc.RpcError as error:
            return MemberStatus(member.endpoint, error=f"{error.code().name}: {error.details()}")
        except ValueError as error:
            raise Closed("this coordinator was closed meanwhile") from error
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

    # --- failures ------------------------------------------------------------------------------------------

    def _failed(self, member: _Member, error: grpc.RpcError) -> EtcdFenceError:
        failure = error_for(error.code().name, error.details() or "", member.endpoint)
        if isinstance(failure, Unavailable | OutcomeUnknown):
            self._move_from(member)
        return failure

    def _move_from(self, member: _Member) -> None:
        """Let the next request go to the member after this one, unless another thread has moved on already."""
        with self._lock:
            if self._members[self._current] is member:
                self._current = (self._current + 1) % len(self._members)


def _out_of_time(error: grpc.RpcError) -> bool:
    """The time limit of a stream travels with it; whether client or server notices first is a matter of luck, and
    the server says it as UNKNOWN."""
    by_server = error.code() is grpc.StatusCode.UNKNOWN and "context deadline exceeded" in (error.details() or "")
    return by_server or error.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def _shorter(within: float, own: float | None) -> float:
    return within if own is None else min(within, own)


def _first_word(stream: Iterable[pb.WatchResponse]) -> Waited:
    """What a watch for one key's deletion says first. A watch that etcd ends without a word is no wake-up."""
    for response in stream:
        if response.compact_revision:
            return Waited.COMPACTED
        if response.canceled:
            raise Unavailable(f"etcd ended the watch: {response.cancel_reason or 'no reason given'}")
        if response.events:
            return Waited.GONE
    raise Unavailable("etcd ended the watch")
