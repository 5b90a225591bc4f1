"""etcd over gRPC, for coroutines. What holds for both colours is in `_members`.

A channel belongs to the event loop it was made in. Cancelling a call cancels the request on the wire, which
says nothing about whether etcd has applied it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import grpc
import grpc.aio

from etcdfence._requests import KeepAlive, KeepAliveReply, Request, Revoke, RevokeReply, Txn, Wait, Waited
from etcdfence._requests import Members as AskMembers
from etcdfence.errors import Closed, LeaseNotFound, OutcomeUnknown, Unavailable
from etcdfence.model import MemberStatus
from etcdfence.transports import _members
from etcdfence.transports._members import METADATA, UNARY, Member, Members, Unary, shorter
from etcdfence.transports._pb import etcdfence_wire_pb2 as pb

T = TypeVar("T")


class GrpcAioTransport:
    """The members of one etcd cluster, for the coroutines of one event loop."""

    def __init__(self, endpoints: Sequence[str]) -> None:
        self._members = Members(endpoints, grpc.aio.insecure_channel)
        self._waits: set[Any] = set()
        self._calls: set[Any] = set()  # those that outlive their callers; gRPC cancels what nobody refers to
        self._closed = self._interrupted = False

    async def call(self, request: Request[T], within: float) -> T:
        if self._closed:
            raise Closed("this coordinator is closed")
        within = shorter(within, getattr(request, "timeout", None))
        known = UNARY.get(type(request))
        if known:
            return cast("T", await self._unary(request, known, within))
        return cast("T", await self._other(request, within))

    def interrupt(self) -> None:
        self._interrupted = True
        for wait in list(self._waits):
            wait.cancel()

    async def close(self) -> None:
        self._closed = True
        self.interrupt()
        if self._calls:
            await asyncio.wait([asyncio.ensure_future(_ended(call)) for call in self._calls], timeout=1.0)
        for member in self._members.all:
            await member.channel.close(None)

    def abandon(self) -> None:
        """A channel cannot be closed without its loop; it ends with it."""
        self._closed = True

    async def _unary(self, request: Any, known: Unary, within: float) -> Any:
        message = known.message(request)
        if getattr(request, "elsewhere", False):
            self._members.move_from(self._members.current)
        member = self._members.current
        call = known.method(member)(message, timeout=within, metadata=METADATA)
        try:
            if isinstance(request, Txn) and request.read_only:
                await self._undisturbed(call)
            reply = await call
        except grpc.aio.UsageError as error:  # closed between our look and the call
            raise Closed("this coordinator is closed") from error
        except (grpc.RpcError, ValueError) as error:
            failure = self._members.failed(member, error)
            if isinstance(request, Revoke) and isinstance(failure, LeaseNotFound):
                return RevokeReply(found=False)
            raise failure from error
        except asyncio.CancelledError as error:
            self._require_own_cancellation(error)
            raise OutcomeUnknown(f"{member.endpoint}: the connection was closed") from error
        return known.reply(request, reply)

    async def _undisturbed(self, call: Any) -> None:
        """Wait for a call that goes on if its caller is cancelled. A read-only transaction that is cancelled on
        the wire makes etcd 3.5.1 panic, and ends that server for everybody."""
        ended = asyncio.Event()
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        call.add_done_callback(lambda _: ended.set())
        await ended.wait()

    def _require_own_cancellation(self, error: asyncio.CancelledError) -> None:
        """gRPC says CancelledError also where a channel was closed under a call, or a wait was interrupted."""
        task = asyncio.current_task()
        if not (self._closed or self._interrupted) or (task is not None and task.cancelling()):
            raise error

    async def _other(self, request: Request[Any], within: float) -> Any:
        if isinstance(request, KeepAlive):
            return await self._keep_alive(request, within)
        if isinstance(request, Wait):
            return await self._wait(request)
        if isinstance(request, AskMembers):
            return tuple([await self._status(member, within) for member in self._members.all])
        raise TypeError(f"{request!r} is not for etcd")

    async def _keep_alive(self, request: KeepAlive, within: float) -> KeepAliveReply:
        member = self._members.current
        messages = iter(_members.keep_alive_messages(request))
        try:
            replies = member.keep_alive(messages, timeout=within, metadata=METADATA)
            return KeepAliveReply({reply.ID: reply.TTL async for reply in replies})
        except grpc.aio.UsageError as error:
            raise Closed("this coordinator is closed") from error
        except (grpc.RpcError, ValueError) as error:
            raise self._members.failed(member, error) from error
        except asyncio.CancelledError as error:
            self._require_own_cancellation(error)
            raise OutcomeUnknown(f"{member.endpoint}: the connection was closed") from error

    async def _wait(self, request: Wait) -> Waited:
        if self._interrupted:
            raise Closed("this coordinator is being closed")
        member = self._members.current
        stream = member.watch(_members.watch_message(request), timeout=request.timeout, metadata=METADATA)
        self._waits.add(stream)
        try:
            async for response in stream:
                word = _members.word_of(response)
                if word:
                    return word
            raise Unavailable("etcd ended the watch")
        except grpc.RpcError as error:
            if _members.out_of_time(error):
                return Waited.TIMED_OUT
            raise self._members.failed(member, error) from error
        except asyncio.CancelledError as error:
            self._require_own_cancellation(error)
            raise Closed("this coordinator was closed while waiting") from error
        finally:
            stream.cancel()
            self._waits.discard(stream)

    async def _status(self, member: Member, timeout: float) -> MemberStatus:
        try:
            return _members.status_of(member, await member.status(pb.StatusRequest(), timeout=timeout))
        except (grpc.RpcError, ValueError) as error:
            return _members.status_failed(member, error)


async def _ended(call: Any) -> None:
    """A call of whose outcome nobody wants to hear."""
    with contextlib.suppress(grpc.RpcError, asyncio.CancelledError):
        await call
