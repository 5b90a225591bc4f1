"""etcd over the HTTP gateway, for places that gRPC does not reach; the client is etcd3gw's.

Its addresses and its session carry every request; its `post` is not used (it follows redirects, which sends a
request twice, and has one time limit for all callers), nor are its lock and its watcher. A request goes to one
member and is never repeated here. A keepalive carries several leases in one POST, a watch is one POST whose answer
does not end. Time limits are those of a socket: a member that sends a byte now and then can stretch them.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar, cast

import requests
import requests.adapters
from etcd3gw.client import Etcd3Client
from urllib3.connection import HTTPConnection
from urllib3.connectionpool import HTTPConnectionPool
from urllib3.exceptions import ConnectTimeoutError, NewConnectionError

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
    Wait,
    Waited,
)
from etcdfence.errors import Closed, EtcdFenceError, LeaseNotFound, Misuse, OutcomeUnknown, Unavailable
from etcdfence.model import MemberStatus
from etcdfence.transports import _json
from etcdfence.transports.endpoints import host_and_port

T = TypeVar("T")
R = TypeVar("R")
NEVER_SENT: Final = (NewConnectionError, ConnectTimeoutError)


class _Line:
    """A client that is lent to one call at a time, and the connection it talks on."""

    def __init__(self, host: str, port: int) -> None:
        self._connection: Any = None
        self.hung_up = False
        session = requests.Session()
        session.trust_env = False  # http_proxy and its like hijack loopback connections
        session.headers["Grpc-Metadata-hasleader"] = "true"  # refuse at once while there is no leader
        adapter: Any = requests.adapters.HTTPAdapter()
        adapter.poolmanager.pool_classes_by_scheme = {"http": self._pool_class()}
        session.mount("http://", adapter)
        self._client = Etcd3Client(host, port, api_path="/v3/", session=session)

    def _pool_class(self) -> type[HTTPConnectionPool]:
        """A pool that shows us its connection: nothing else can end a read that another thread is in."""
        line = self

        class Connection(HTTPConnection):
            def connect(self) -> None:
                super().connect()
                line._connection = self
                if line.hung_up:  # before there was anything to hang up
                    self.close()
                    raise ConnectionAbortedError("this wait was given up")

        class Pool(HTTPConnectionPool):
            ConnectionCls = Connection

        return Pool

    def post(self, path: str, body: str, within: float, *, stream: bool = False) -> requests.Response:
        return self._client.session.post(
            self._client.get_url(path),
            data=body,
            headers={"Content-Type": "application/json"},
            timeout=within,
            stream=stream,
            allow_redirects=False,  # followed, a request would be sent a second time
        )

    def hang_up(self) -> None:
        """End what is under way here, or about to be; the line is of no use afterwards."""
        self.hung_up = True
        sock = getattr(self._connection, "sock", None)
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Its connections at once: a session leaves them to a finaliser, which at exit may have run already."""
        if self._connection is not None:
            self._connection.close()
        self._client.session.close()


class _Member:
    """One endpoint and the lines to it that are free."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        host, _, port = host_and_port(endpoint).rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._free: list[_Line] = []
        self._closed = False

    @contextmanager
    def line(self) -> Iterator[_Line]:
        try:
            line = self._free.pop()
        except IndexError:
            line = _Line(self._host, self._port)
        try:
            yield line
        except BaseException:
            line.close()  # there may be an answer to come
            raise
        if line.hung_up:
            line.close()
            return
        self._free.append(line)
        if self._closed:
            self.close()

    def close(self) -> None:
        self._closed = True
        while self._free:
            self._free.pop().close()


class GatewayTransport:
    """The members of one etcd cluster, for threads."""

    def __init__(self, endpoints: Sequence[str]) -> None:
        if not endpoints:
            raise Misuse("at least one endpoint is needed, such as http://127.0.0.1:2379")
        self._members = [_Member(endpoint) for endpoint in endpoints]
        self._current = 0
        # By the identity of their requests: waits that are under way, with their line once there is one.
        self._waits: dict[int, _Line | None] = {}
        self._given_up: set[int] = set()
        self._lock = threading.RLock()
        self._closed = self._interrupted = False
        self._handlers: dict[type[Request[Any]], Callable[[Any, float], Any]] = {
            Txn: self._txn,
            Grant: self._grant,
            Revoke: self._revoke,
            TimeToLive: self._time_to_live,
            KeepAlive: self._keep_alive,
            Wait: self._wait,
            Members: self._members_status,
        }

    def call(self, request: Request[T], within: float) -> T:
        if self._closed:
            raise Closed("this coordinator is closed")
        own = getattr(request, "timeout", None)
        return cast("T", self._handlers[type(request)](request, within if own is None else min(within, own)))

    def interrupt(self) -> None:
        with self._lock:
            self._interrupted = True
            for line in self._waits.values():
                if line is not None:
                    line.hang_up()

    def expect(self, request: Wait) -> None:
        """This wait is about to be called, in another thread; it may be hung up from now on."""
        with self._lock:
            self._waits.setdefault(id(request), None)

    def hang_up(self, request: Wait) -> None:
        """End one wait, from any thread: nobody waits for it any more. One that has ended is left alone, and so is
        whoever has its line (or its identity) now."""
        with self._lock:
            if id(request) not in self._waits:
                return
            self._given_up.add(id(request))
            line = self._waits[id(request)]
            if line is not None:
                line.hang_up()

    def close(self) -> None:
        self._closed = True
        self.interrupt()
        for member in self._members:
            member.close()

    # --- requests ------------------------------------------------------------------------------------------

    def _txn(self, request: Txn, within: float) -> TxnReply:
        if request.elsewhere:
            self._move_from(self._members[self._current])
        return self._ask("/kv/txn", _json.txn(request), within, lambda found: _json.txn_reply(request, found))

    def _grant(self, request: Grant, within: float) -> GrantReply:
        body = {"ID": str(request.lease_id), "TTL": str(request.ttl)}
        return self._ask("/lease/grant", body, within, lambda found: GrantReply(int(found.get("TTL", 0))))

    def _revoke(self, request: Revoke, within: float) -> RevokeReply:
        body = {"ID": str(request.lease_id)}
        try:
            return self._ask("/lease/revoke", body, within, lambda _: RevokeReply(found=True))
        except LeaseNotFound:
            return RevokeReply(found=False)

    def _time_to_live(self, request: TimeToLive, within: float) -> TimeToLiveReply:
        return self._ask("/lease/timetolive", {"ID": str(request.lease_id)}, within, _json.time_to_live)

    def _keep_alive(self, request: KeepAlive, within: float) -> KeepAliveReply:
        ttls: dict[int, int] = {}
        for body in _json.keep_alives(request.lease_ids):
            ttls |= self._exchange("/lease/keepalive", body, within, _json.renewed)
        return KeepAliveReply(ttls)

    def _members_status(self, _request: Members, within: float) -> tuple[MemberStatus, ...]:
        return tuple(self._status(member, within) for member in self._members)

    def _status(self, member: _Member, within: float) -> MemberStatus:
        try:
            return self._exchange(
                "/maintenance/status", "{}", within, lambda body: _json.status(member.endpoint, body), member
            )
        except EtcdFenceError as error:
            return MemberStatus(member.endpoint, error=str(error))

    def _ask(self, path: str, body: _json.Document, within: float, read: Callable[[_json.Document], R]) -> R:
        return self._exchange(path, json.dumps(body), within, lambda content: read(_json.answer(content)))

    def _exchange(
        self, path: str, body: str, within: float, read: Callable[[bytes], R], member: _Member | None = None
    ) -> R:
        """One POST to one member, and what its whole answer means."""
        member = member or self._members[self._current]
        with self._mapped(member):
            with member.line() as line:
                reply = line.post(path, body, within)
                content = reply.content
            if reply.status_code != requests.codes["ok"]:
                raise _told(content, f"{reply.status_code} {reply.reason}", member)
            return read(content)

    def _wait(self, request: Wait, _within: float) -> Waited:
        member = self._members[self._current]
        with self._mapped(member), self._under_way(request), member.line() as line, self._on(line, request):
            body = json.dumps(_json.watch(request))
            if not request.timeout > 0:
                return Waited.TIMED_OUT
            try:
                stream = line.post("/watch", body, request.timeout, stream=True)
                if stream.status_code != requests.codes["ok"]:
                    raise _told(stream.content, f"{stream.status_code} {stream.reason}", member)
                word = _json.first_word(_json.documents(stream.iter_content(None)))
            except (requests.RequestException, AttributeError) as error:  # AttributeError: hung up between reads
                if self._interrupted or id(request) in self._given_up:
                    raise _gave_up() from error
                if isinstance(error, requests.Timeout) or "timed out" in str(error):
                    line.close()
                    return Waited.TIMED_OUT
                raise
            stream.close()
            line.close()  # the answer to a watch does not end
            return word

    @contextmanager
    def _under_way(self, request: Wait) -> Iterator[None]:
        self.expect(request)
        try:
            yield
        finally:
            with self._lock:
                self._waits.pop(id(request), None)
                self._given_up.discard(id(request))

    @contextmanager
    def _on(self, line: _Line, request: Wait) -> Iterator[None]:
        """The wait has this line, until the line goes to somebody else."""
        with self._lock:
            self._waits[id(request)] = line
            if self._interrupted or id(request) in self._given_up:
                raise _gave_up()
        try:
            yield
        finally:
            with self._lock:
                self._waits[id(request)] = None

    # --- failures ------------------------------------------------------------------------------------------

    @contextmanager
    def _mapped(self, member: _Member) -> Iterator[None]:
        """Whatever requests raises, and whatever cannot be read in an answer, as one of ours."""
        try:
            yield
        except EtcdFenceError as error:
            self._moved_by(error, member)
            raise
        except requests.RequestException as error:
            raise self._moved_by(_failure(error, member), member) from error
        except _json.UNREADABLE as error:
            unknown = OutcomeUnknown(f"{member.endpoint}: the answer is not etcd's: {error}")
            raise self._moved_by(unknown, member) from error

    def _moved_by(self, failure: EtcdFenceError, member: _Member) -> EtcdFenceError:
        if isinstance(failure, Unavailable | OutcomeUnknown):
            self._move_from(member)
        return failure

    def _move_from(self, member: _Member) -> None:
        with self._lock:
            if self._members[self._current] is member:
                self._current = (self._current + 1) % len(self._members)


def _failure(error: requests.RequestException, member: _Member) -> EtcdFenceError:
    """Definitely not sent where no connection came about; else nobody knows."""
    inner = error.args[0] if error.args else None
    reason = getattr(inner, "reason", inner)
    kind = Unavailable if isinstance(reason, NEVER_SENT) else OutcomeUnknown
    return kind(f"{member.endpoint}: {error}")


def _told(body: bytes, otherwise: str, member: _Member) -> EtcdFenceError:
    """What an error document says; anything else in its place (a proxy's page, say) is ambiguous."""
    try:
        return _json.error_in(json.loads(body), member.endpoint)
    except _json.UNREADABLE:
        text = body.decode(errors="replace")
        return OutcomeUnknown(f"{member.endpoint}: {otherwise}: {text[:200]}")


def _gave_up() -> Closed:
    return Closed("this coordinator was closed while waiting, or the wait was given up")
