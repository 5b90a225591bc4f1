"""etcd over the HTTP gateway, for places that gRPC does not reach; the client is etcd3gw's.

Its `post` carries every request; its lock and its watcher are not used. An etcd3gw client knows one host and one
time limit, so a client is lent to one call at a time. A request goes to one member and is never repeated here.
Over HTTP/1.1 the gateway answers when it has the whole request: a keepalive for many leases is one POST of many
documents, a watch is one POST whose answer does not end.
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
from etcd3gw.client import Etcd3Client
from etcd3gw.exceptions import Etcd3Exception
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
    Waited,
    WaitGone,
)
from etcdfence.errors import Closed, EtcdFenceError, LeaseNotFound, Misuse, OutcomeUnknown, Unavailable
from etcdfence.model import MemberStatus
from etcdfence.transports import _json
from etcdfence.transports.codes import error_for
from etcdfence.transports.endpoints import host_and_port

T = TypeVar("T")
# The names of gRPC's status codes by their numbers, as the gateway's error documents have them.
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
NEVER_SENT: Final = (NewConnectionError, ConnectTimeoutError)


class _Member:
    """One endpoint and the clients that are free for it."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        host, _, port = host_and_port(endpoint).rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._free: list[Etcd3Client] = []

    @contextmanager
    def client(self, timeout: float) -> Iterator[Etcd3Client]:
        try:
            client = self._free.pop()
        except IndexError:
            client = self._new()
        client.timeout = timeout
        try:
            yield client
        except BaseException:
            _close(client)  # there may be an answer to come on its connection
            raise
        self._free.append(client)

    def _new(self) -> Etcd3Client:
        session = requests.Session()
        session.trust_env = False  # http_proxy and its like hijack loopback connections
        session.headers["Grpc-Metadata-hasleader"] = "true"  # refuse at once while there is no leader
        return Etcd3Client(self._host, self._port, api_path="/v3/", session=session)

    def close(self) -> None:
        while self._free:
            _close(self._free.pop())


def _close(client: Etcd3Client) -> None:
    """Its connections at once: a session leaves them to a finaliser, which at exit may have run already."""
    adapter: Any = client.session.get_adapter(client.base_url)
    pools = adapter.poolmanager.pools
    for pool in [pools.get(key) for key in pools.keys()]:  # noqa: SIM118 - not a mapping that iterates
        if pool is not None:
            pool.close()
    client.session.close()


class GatewayTransport:
    """The members of one etcd cluster, for threads."""

    def __init__(self, endpoints: Sequence[str]) -> None:
        if not endpoints:
            raise Misuse("at least one endpoint is needed, such as http://127.0.0.1:2379")
        self._members = [_Member(endpoint) for endpoint in endpoints]
        self._current = 0
        self._waits: dict[int, Any] = {}  # the answer that is being read, by the identity of its request
        self._given_up: set[int] = set()
        self._lock = threading.RLock()
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
        own = getattr(request, "timeout", None)
        return cast("T", self._handlers[type(request)](request, within if own is None else min(within, own)))

    def interrupt(self) -> None:
        with self._lock:
            self._interrupted = True
            waits = list(self._waits.values())
        for wait in waits:
            _hang_up(wait)

    def hang_up(self, request: WaitGone) -> None:
        """End one wait, from any thread: nobody waits for it any more."""
        with self._lock:
            self._given_up.add(id(request))
            stream = self._waits.get(id(request))
        if stream is not None:
            _hang_up(stream)

    def close(self) -> None:
        self._closed = True
        self.interrupt()
        for member in self._members:
            member.close()

    # --- requests ------------------------------------------------------------------------------------------

    def _txn(self, request: Txn, within: float) -> TxnReply:
        if request.elsewhere:
            self._move_from(self._members[self._current])
        return _json.txn_reply(self._post("/kv/txn", _json.txn(request), within))

    def _grant(self, request: Grant, within: float) -> GrantReply:
        body = {"ID": str(request.lease_id), "TTL": str(request.ttl)}
        return GrantReply(int(self._post("/lease/grant", body, within).get("TTL", 0)))

    def _revoke(self, request: Revoke, within: float) -> RevokeReply:
        try:
            self._post("/lease/revoke", {"ID": str(request.lease_id)}, within)
        except LeaseNotFound:
            return RevokeReply(found=False)
        return RevokeReply(found=True)

    def _time_to_live(self, request: TimeToLive, within: float) -> TimeToLiveReply:
        found = self._post("/lease/timetolive", {"ID": str(request.lease_id)}, within)
        return TimeToLiveReply(int(found.get("TTL", 0)), int(found.get("grantedTTL", 0)))

    def _keep_alive(self, request: KeepAlive, within: float) -> KeepAliveReply:
        body = "".join(f'{{"ID":"{lease_id}"}}\n' for lease_id in request.lease_ids)
        member = self._members[self._current]
        with self._mapped(member), member.client(within) as client:
            url = client.get_url("/lease/keepalive")
            reply = client.session.post(url, data=body, timeout=within)
            _require_ok(reply, member)
            results = [_result(document, member) for document in _json.documents([reply.content])]
        return KeepAliveReply({int(one.get("ID", 0)): int(one.get("TTL", 0)) for one in results})

    def _wait_gone(self, request: WaitGone, _within: float) -> Waited:
        member = self._members[self._current]
        with self._mapped(member), member.client(request.timeout) as client:
            try:
                stream = client.session.post(
                    client.get_url("/watch"), json=_json.watch(request), timeout=request.timeout, stream=True
                )
            except requests.Timeout:
                return Waited.TIMED_OUT
            with self._waiting(request, stream):
                _require_ok(stream, member)
                return self._first_word(stream, member)

    @contextmanager
    def _waiting(self, request: WaitGone, stream: requests.Response) -> Iterator[None]:
        try:
            with self._lock:
                self._waits[id(request)] = stream
            if self._interrupted or id(request) in self._given_up:
                raise Closed("this coordinator is being closed, or the wait was given up")
            yield
        finally:
            with self._lock:
                self._waits.pop(id(request), None)
                self._given_up.discard(id(request))
            stream.close()

    def _first_word(self, stream: requests.Response, member: _Member) -> Waited:
        try:
            for document in _json.documents(stream.iter_content(None)):
                result = _result(document, member)
                if int(result.get("compact_revision", 0)):
                    return Waited.COMPACTED
                if result.get("canceled"):
                    raise Unavailable(f"etcd ended the watch: {result.get('cancel_reason') or 'no reason given'}")
                if result.get("events"):
                    return Waited.GONE
        except requests.ConnectionError as error:
            if "timed out" in str(error):  # what requests makes of a time limit inside a body
                return Waited.TIMED_OUT
            if not self._interrupted:
                raise
        except (requests.RequestException, AttributeError):  # hung up by `interrupt`, between two reads
            if not self._interrupted:
                raise
        if self._interrupted:
            raise Closed("this coordinator was closed while waiting")
        raise Unavailable("etcd ended the watch")

    def _members_status(self, _request: Members, within: float) -> tuple[MemberStatus, ...]:
        return tuple(self._status(member, within) for member in self._members)

    def _status(self, member: _Member, within: float) -> MemberStatus:
        try:
            with self._mapped(member), member.client(within) as client:
                found = client.post(client.get_url("/maintenance/status"), json={})
        except EtcdFenceError as error:
            return MemberStatus(member.endpoint, error=str(error))
        head = found.get("header", {})
        return MemberStatus(
            endpoint=member.endpoint,
            version=found.get("version", ""),
            leader=found.get("leader") == head.get("member_id"),
            db_size=int(found.get("dbSize", 0)),
            revision=int(head.get("revision", 0)),
            cluster_id=int(head.get("cluster_id", 0)),
            member_id=int(head.get("member_id", 0)),
            alarms=tuple(found.get("errors", ())),
        )

    def _post(self, path: str, body: _json.Document, within: float) -> _json.Document:
        member = self._members[self._current]
        with self._mapped(member), member.client(within) as client:
            found = client.post(client.get_url(path), json=body)
            if not isinstance(found, dict):
                raise OutcomeUnknown(f"{member.endpoint}: the answer is not a document: {found!r}")
            return found

    # --- failures ------------------------------------------------------------------------------------------

    @contextmanager
    def _mapped(self, member: _Member) -> Iterator[None]:
        """Whatever etcd3gw and requests raise, as one of ours."""
        try:
            yield
        except EtcdFenceError as error:
            self._moved_by(error, member)
            raise
        except Etcd3Exception as error:
            failure = _failure(error.__context__, member) if error.__context__ else None
            failure = failure or _told(error.detail_text, str(error), member)
            raise self._moved_by(failure, member) from error
        except (requests.RequestException, ValueError) as error:  # ValueError: an answer that is no JSON
            raise self._moved_by(_failure(error, member), member) from error

    def _moved_by(self, failure: EtcdFenceError, member: _Member) -> EtcdFenceError:
        if isinstance(failure, Unavailable | OutcomeUnknown):
            self._move_from(member)
        return failure

    def _move_from(self, member: _Member) -> None:
        with self._lock:
            if self._members[self._current] is member:
                self._current = (self._current + 1) % len(self._members)


def _failure(error: BaseException, member: _Member) -> EtcdFenceError:
    """Definitely not sent where no connection came about; else nobody knows."""
    inner = error.args[0] if error.args else None
    reason = getattr(inner, "reason", inner)
    kind = Unavailable if isinstance(reason, NEVER_SENT) else OutcomeUnknown
    return kind(f"{member.endpoint}: {error}")


def _told(body: str | None, otherwise: str, member: _Member) -> EtcdFenceError:
    """What an error document says; anything else in its place (a proxy's page, say) is ambiguous."""
    document: Any = None
    with contextlib.suppress(ValueError):
        document = json.loads(body or "")
    if not isinstance(document, dict) or not isinstance(document.get("code"), int):
        return OutcomeUnknown(f"{member.endpoint}: {body or otherwise or 'no answer'}")
    code = document["code"]
    name = CODES[code] if 0 <= code < len(CODES) else "UNKNOWN"
    return error_for(name, str(document.get("message") or document.get("error") or ""), member.endpoint)


def _result(document: _json.Document, member: _Member) -> _json.Document:
    """The message in one document of a stream, or the error in its place."""
    error = document.get("error")
    if error is not None:
        inner = error if isinstance(error, dict) else {"message": str(error)}
        code = inner.get("code", inner.get("grpc_code"))
        raise _told(json.dumps(inner | {"code": code}), str(error), member)
    result = document.get("result")
    return result if isinstance(result, dict) else {}


def _require_ok(reply: requests.Response, member: _Member) -> None:
    if reply.status_code != requests.codes["ok"]:
        raise _told(reply.text, reply.reason, member)


def _hang_up(stream: requests.Response) -> None:
    """End a read that another thread is in."""
    connection = getattr(stream.raw, "connection", None)
    sock = getattr(connection, "sock", None)
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
