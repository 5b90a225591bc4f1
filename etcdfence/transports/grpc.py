"""etcd over gRPC, synchronous. What holds for both colours is in `_members`."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Final, TypeVar, cast

import grpc

from etcdfence._requests import KeepAlive, KeepAliveReply, Request, Revoke, RevokeReply, Wait, Waited
from etcdfence._requests import Members as AskMembers
from etcdfence.errors import Closed, LeaseNotFound, Unavailable
from etcdfence.model import MemberStatus
from etcdfence.transports import _members
from etcdfence.transports._members import METADATA, UNARY, Member, Members, Unary, shorter
from etcdfence.transports._pb import etcdfence_wire_pb2 as pb

T = TypeVar("T")


CLOSING: Final = 1.0  # seconds


def _close(channel: Any) -> None:
    """gRPC waits for its calls to end, and where Ctrl-C came in the very beginning of one, it waits for ever."""
    closing = threading.Thread(target=channel.close, name="etcdfence-close-channel", daemon=True)
    try:
        closing.start()
    except RuntimeError:  # the interpreter is ending, and all connections with it
        return
    closing.join(CLOSING)


class GrpcTransport:
    """The members of one etcd cluster, for threads."""

    def __init__(self, endpoints: Sequence[str]) -> None:
        self._members = Members(endpoints, grpc.insecure_channel)
        self._waits: set[Any] = set()
        self._lock = threading.RLock()  # a signal handler may close us in the middle of a call
        self._closed = self._interrupted = False

    def call(self, request: Request[T], within: float) -> T:
        if self._closed:
            raise Closed("this coordinator is closed")
        within = shorter(within, getattr(request, "timeout", None))
        known = UNARY.get(type(request))
        return cast("T", self._unary(request, known, within) if known else self._other(request, within))

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
        for member in self._members.all:
            _close(member.channel)

    def _unary(self, request: Any, known: Unary, within: float) -> Any:
        message = known.message(request)
        if getattr(request, "elsewhere", False):
            self._members.move_from(self._members.current)
        member = self._members.current
        try:
            return known.reply(request, known.method(member)(message, timeout=within, metadata=METADATA))
        except (grpc.RpcError, ValueError) as error:
            failure = self._members.failed(member, error)
            if isinstance(request, Revoke) and isinstance(failure, LeaseNotFound):
                return RevokeReply(found=False)
            raise failure from error

    def _other(self, request: Request[Any], within: float) -> Any:
        if isinstance(request, KeepAlive):
            return self._keep_alive(request, within)
        if isinstance(request, Wait):
            return self._wait(request)
        if isinstance(request, AskMembers):
            return tuple(self._status(member, within) for member in self._members.all)
        raise TypeError(f"{request!r} is not for etcd")

    def _keep_alive(self, request: KeepAlive, within: float) -> KeepAliveReply:
        """One exchange on one stream: all requests, then the end of our half; etcd answers each and ends."""
        member = self._members.current
        messages = iter(_members.keep_alive_messages(request))
        try:
            replies = member.keep_alive(messages, timeout=within, metadata=METADATA)
            return KeepAliveReply({reply.ID: reply.TTL for reply in replies})
        except (grpc.RpcError, ValueError) as error:
            raise self._members.failed(member, error) from error

    def _wait(self, request: Wait) -> Waited:
        member = self._members.current
        try:
            stream = member.watch(_members.watch_message(request), timeout=request.timeout, metadata=METADATA)
        except ValueError as error:
            raise Closed("this coordinator is closed") from error
        try:
            with self._lock:
                self._waits.add(stream)
            if self._interrupted:
                raise Closed("this coordinator is being closed")
            for response in stream:
                word = _members.word_of(response)
                if word:
                    return word
            raise Unavailable("etcd ended the watch")  # without a word: that is no wake-up
        except grpc.RpcError as error:
            if _members.out_of_time(error):
                return Waited.TIMED_OUT
            if self._interrupted:
                raise Closed("this coordinator was closed while waiting") from error
            raise self._members.failed(member, error) from error
        finally:
            stream.cancel()
            with self._lock:
                self._waits.discard(stream)

    def _status(self, member: Member, timeout: float) -> MemberStatus:
        try:
            return _members.status_of(member, member.status(pb.StatusRequest(), timeout=timeout))
        except (grpc.RpcError, ValueError) as error:
            return _members.status_failed(member, error)
