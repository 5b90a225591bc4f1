"""What only the HTTP gateway can do wrong: documents in pieces, envelopes, zeros left out, a lost fence."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import etcdfence
from etcdfence import Closed, Misuse, OutcomeUnknown, PermissionDenied, Unavailable
from etcdfence._requests import (
    Compare,
    Grant,
    GrantReply,
    KeepAlive,
    KeepAliveReply,
    Put,
    Range,
    Revoke,
    Target,
    TimeToLive,
    TimeToLiveReply,
    Txn,
    Wait,
    Waited,
)
from etcdfence.server import free_ports
from etcdfence.transports import _json, gateway
from etcdfence.transports.codes import TABLE
from etcdfence.transports.gateway import GatewayTransport

Answer = tuple[int, list[bytes]]
HEADER = {"cluster_id": "18446744073709551615", "revision": "7"}


@contextmanager
def answering(answer: Callable[[str, bytes], Answer]) -> Iterator[GatewayTransport]:
    """A server that answers each POST with a status and these chunks, one write each."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            status, chunks = answer(self.path, self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(status)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for chunk in chunks:
                self.wfile.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
                self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n")

        def log_message(self, *_: object) -> None:
            """Nothing is printed."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    transport = GatewayTransport([f"http://127.0.0.1:{server.server_address[1]}"])
    try:
        yield transport
    finally:
        transport.close()
        server.shutdown()
        server.server_close()


def always(status: int, *chunks: bytes) -> Callable[[str, bytes], Answer]:
    return lambda _path, _body: (status, list(chunks))


def enveloped(**result: Any) -> bytes:
    return json.dumps({"result": result}).encode() + b"\n"


@given(st.lists(st.integers(1, 40), max_size=30), st.lists(st.text(max_size=20), min_size=1, max_size=5))
def test_documents_survive_any_cut(cuts: list[int], texts: list[str]) -> None:
    whole = b"".join(enveloped(text=text) for text in texts)
    chunks, rest = [], whole
    for cut in cuts:
        chunks.append(rest[:cut])
        rest = rest[cut:]
    found = [document["result"]["text"] for document in _json.documents([*chunks, rest])]
    assert found == texts


GONE = enveloped(created=True, header={"revision": "7"}) + enveloped(
    events=[{"type": "DELETE", "kv": {"key": "aw=="}}]
)


@pytest.mark.parametrize("size", [1, 2, 7, 30, 1000])
def test_a_watch_in_pieces(size: int) -> None:
    pieces = [GONE[start : start + size] for start in range(0, len(GONE), size)]
    with answering(always(200, *pieces)) as wire:
        assert wire.call(Wait(b"k", 1, 5.0), 5) is Waited.WOKEN


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        ([enveloped(created=True), enveloped(canceled=True, compact_revision="9")], Waited.COMPACTED),
        ([enveloped(created=True, canceled=True, cancel_reason="permission denied")], Unavailable),
        ([enveloped(created=True)], Unavailable),
        ([b'{"error":{"grpc_code":14,"http_code":503,"message":"etcdserver: no leader"}}\n'], Unavailable),
        ([b'{"error":{"code":7,"message":"etcdserver: permission denied"}}\n'], PermissionDenied),
        ([b'{"error":"something else"}\n'], OutcomeUnknown),
        ([b"<html>a proxy's page</html>\n"], OutcomeUnknown),
        ([b"[1, 2]\n"], OutcomeUnknown),
    ],
)
def test_what_a_watch_may_say(chunks: list[bytes], expected: Any) -> None:
    with answering(always(200, *chunks)) as wire:
        if isinstance(expected, Waited):
            assert wire.call(Wait(b"k", 1, 5.0), 5) is expected
        else:
            with pytest.raises(expected):
                wire.call(Wait(b"k", 1, 5.0), 5)


def test_fields_that_are_zero_are_left_out() -> None:
    with answering(always(200, b'{"header":{"cluster_id":"5"}}')) as wire:
        reply = wire.call(Txn((), (Range(b"k"),)), 5)
        assert (reply.succeeded, reply.reads, reply.header.revision) == (False, (), 0)
        assert wire.call(TimeToLive(1), 5) == TimeToLiveReply(0, 0)
        assert wire.call(Grant(1, 5), 5) == GrantReply(0)
        assert wire.call(Revoke(1), 5).found
    renewed = enveloped(ID="9223372036854775807", TTL="15") + enveloped(ID="8")
    with answering(always(200, renewed)) as wire:
        assert wire.call(KeepAlive((2**63 - 1, 8), 5.0), 5) == KeepAliveReply({2**63 - 1: 15, 8: 0})


def test_an_empty_range_and_large_numbers() -> None:
    kv = {"key": "aw==", "mod_revision": "9007199254740993", "create_revision": "1", "version": "2", "lease": "5"}
    responses = [{"response_range": {}}, {"response_put": {}}, {"response_range": {"kvs": [kv], "count": "1"}}]
    body = json.dumps({"header": HEADER, "succeeded": True, "responses": responses}).encode()
    with answering(always(200, body)) as wire:
        empty, found = wire.call(Txn((), (Range(b"q"), Put(b"p", b""), Range(b"k"))), 5).reads
    assert (empty.kvs, empty.count) == ((), 0)
    assert found.first is not None
    assert (found.first.mod_revision, found.first.value, found.first.lease) == (2**53 + 1, b"", 5)


@pytest.mark.parametrize("row", TABLE, ids=str)
def test_every_row_of_the_table_of_codes(row: tuple[str, str, type[Exception]]) -> None:
    code, text, kind = row
    envelope = json.dumps({"code": _json.CODES.index(code), "message": f"etcdserver: {text}"}).encode()
    with answering(always(400, envelope)) as wire, pytest.raises(kind):
        wire.call(Txn((), (Put(b"k", b"v"),)), 5)


@pytest.mark.parametrize("status", [200, 400, 404, 429, 500, 502, 503, 504])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"[]",
        b"3",
        b"{}",
        b'{"code":99}',
        b'{"code":"x"}',
        b'{"header":null}',
        b'{"header":{"cluster_id":"1"},"responses":null}',
        b'{"header":{"cluster_id":"1"},"succeeded":true}',
        b'{"status":"ok"}',
        b"[" * 100_000,
        b"\xff\xfe",
    ],
)
def test_an_answer_that_is_none_of_etcds_is_ambiguous(status: int, body: bytes) -> None:
    with answering(always(status, body)) as wire, pytest.raises(OutcomeUnknown):
        wire.call(Txn((), (Put(b"k", b"v"),)), 5)


def test_only_what_was_never_sent_is_unavailable() -> None:
    wire = GatewayTransport([f"http://127.0.0.1:{free_ports(1)[0]}"])
    with pytest.raises(Unavailable):
        wire.call(Txn((), (Put(b"k", b"v"),)), 2)
    wire.close()
    with socket.create_server(("127.0.0.1", 0)) as server:
        wire = GatewayTransport([f"http://127.0.0.1:{server.getsockname()[1]}"])
        threading.Thread(target=lambda: server.accept()[0].close(), daemon=True).start()
        with pytest.raises(OutcomeUnknown):
            wire.call(Txn((), (Put(b"k", b"v"),)), 2)
        wire.close()


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_is_not_followed(status: int) -> None:
    """A request that is sent on would be sent twice."""
    paths: list[str] = []

    def answer(path: str, _body: bytes) -> Answer:
        paths.append(path)
        return status, [b""]

    with answering(answer) as wire, pytest.raises(OutcomeUnknown):
        wire.call(Txn((), (Put(b"k", b"v"),)), 5)
    assert paths == ["/v3/kv/txn"]


def test_errors_do_not_depend_on_what_the_caller_is_handling() -> None:
    envelope = json.dumps({"code": 14, "message": "etcdserver: request timed out"}).encode()
    with answering(always(503, envelope)) as wire:
        try:
            GatewayTransport([f"http://127.0.0.1:{free_ports(1)[0]}"]).call(Txn((), ()), 1)
        except Unavailable:
            with pytest.raises(OutcomeUnknown):
                wire.call(Txn((), (Put(b"k", b"v"),)), 5)


def test_a_refusal_keeps_its_connection_and_a_broken_call_leaves_none() -> None:
    envelope = json.dumps({"code": 5, "message": "etcdserver: requested lease not found"}).encode()
    with answering(always(404, envelope)) as wire:
        for _ in range(5):
            assert not wire.call(Revoke(1), 5).found
        assert len(wire._members[0]._free) == 1


def test_a_wait_interrupted_before_it_is_sent_is_not_sent(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interruption falls between the look at the flag and the request, on a fresh line and on a used one."""
    for used in (False, True):
        wire = GatewayTransport([endpoint])
        if used:
            wire.call(Txn((), ()), 5)
        post = gateway._Line.post

        def interrupted(
            line: Any, *arguments: Any, wire: GatewayTransport = wire, post: Any = post, **named: Any
        ) -> Any:
            wire.interrupt()
            return post(line, *arguments, **named)

        monkeypatch.setattr(gateway._Line, "post", interrupted)
        began = time.monotonic()
        with pytest.raises(Closed):
            wire.call(Wait(b"/nobody's", 2**62, 30.0), 5)
        assert time.monotonic() - began < 5
        monkeypatch.undo()
        wire.close()


@pytest.mark.parametrize("lost", ["mod_revision", "create_revision", "lease", "range_end", "target", "compare"])
def test_a_fence_that_gets_lost_is_noticed_before_it_is_needed(
    endpoint: str, namespace: str, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part of a comparison misspelt on its way: etcd's gateway ignores it, and connecting refuses."""
    spelled = _json.txn

    def misspelt(request: Txn) -> dict[str, Any]:
        document = spelled(request)
        if lost == "compare":
            document["kompare"] = document.pop("compare")
        for compare in document.get("compare", ()):
            if lost in compare:
                compare[f"{lost}x"] = compare.pop(lost)
        return document

    etcdfence.connect(endpoint, namespace=namespace).close()  # the namespace is founded
    monkeypatch.setattr(_json, "txn", misspelt)
    with pytest.raises(Misuse, match="comparisons do not reach etcd whole"):
        etcdfence.connect(endpoint, namespace=namespace, transport="gateway")


def test_the_environment_chooses_the_gateway(
    endpoint: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ETCDFENCE_TRANSPORT", "gateway")
    with etcdfence.connect(endpoint, namespace=namespace) as coordinator:
        assert isinstance(coordinator._engine.host._transport, GatewayTransport)
    monkeypatch.setenv("ETCDFENCE_TRANSPORT", "carrier pigeon")
    with pytest.raises(Misuse, match="use 'grpc' or 'gateway'"):
        etcdfence.connect(endpoint, namespace=namespace)


def test_what_is_misspelt_does_pass(endpoint: str) -> None:
    """Why connecting begins with transactions that must fail."""
    wire = GatewayTransport([endpoint])
    body = _json.txn(Txn((Compare(Target.MOD, b"/nobody's", 7),), ()))
    body["compare"][0]["mod_revisoin"] = body["compare"][0].pop("mod_revision")
    assert wire._ask("/kv/txn", body, 5.0, dict)["succeeded"] is True
    wire.close()
