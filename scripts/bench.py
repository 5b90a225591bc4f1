"""The benchmark: every figure of etcdfence beside the same work with a bare client, in turns, in one run.

Only ratios mean something: they compare two ways on one machine at one time. Nothing here is a test.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import statistics
import subprocess
import sys
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
from etcd3gw.client import Etcd3Client

import etcdfence
from etcdfence._connect import over
from etcdfence._requests import KeepAlive, Request, Txn
from etcdfence.server import LocalEtcd
from etcdfence.testing.explore import explore
from etcdfence.transports import _json
from etcdfence.transports._pb import etcdfence_wire_pb2 as pb
from etcdfence.transports._wire import txn_bytes
from etcdfence.transports.gateway import GatewayTransport
from etcdfence.transports.grpc import GrpcTransport

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.simulation.scenarios import CLAIMS


class Counting:
    """The transport, counting requests to etcd and keeping the last transaction."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint, self.wire = endpoint, GrpcTransport([endpoint])
        self.requests = 0
        self.last: Txn | None = None

    def call(self, request: Request[Any], within: float) -> Any:
        self.requests += 1
        if isinstance(request, Txn):
            self.last = request
        return self.wire.call(request, within)

    def again(self) -> GrpcTransport:
        """Another wire to the same etcd, which is not counted."""
        return GrpcTransport([self.endpoint])

    def interrupt(self) -> None:
        self.wire.interrupt()

    def close(self) -> None:
        self.wire.close()


class Bare:
    def __init__(self, endpoint: str) -> None:
        self.channel = grpc.insecure_channel(endpoint.removeprefix("http://"))
        self.txn = self._stub("KV/Txn", pb.TxnRequest, pb.TxnResponse)
        self.grant = self._stub("Lease/LeaseGrant", pb.LeaseGrantRequest, pb.LeaseGrantResponse)
        self.revoke = self._stub("Lease/LeaseRevoke", pb.LeaseRevokeRequest, pb.LeaseRevokeResponse)

    def _stub(self, path: str, request: Any, reply: Any) -> Any:
        return self.channel.unary_unary(
            f"/etcdserverpb.{path}",
            request_serializer=request.SerializeToString,
            response_deserializer=reply.FromString,
        )

    def compare_and_put(self, key: bytes = b"/bench/bare") -> None:
        reply = self.txn(
            pb.TxnRequest(
                compare=[pb.Compare(target=pb.Compare.CREATE, key=b"/bench/absent", create_revision=0)],
                success=[pb.RequestOp(request_put=pb.PutRequest(key=key, value=b"v" * 100))],
            ),
            timeout=5,
        )
        if not reply.succeeded:
            raise RuntimeError("the bare transaction was refused")


@dataclass
class Figure:
    name: str
    seconds: list[float] = field(default_factory=list)
    requests: float = 1.0

    def line(self, base: Figure) -> str:
        p50, p99 = statistics.median(self.seconds), sorted(self.seconds)[int(len(self.seconds) * 0.99)]
        ratio = p50 / statistics.median(base.seconds)
        return (
            f"  {self.name:<46}{p50 * 1e6:9.0f}{p99 * 1e6:9.0f}{1 / statistics.mean(self.seconds):9.0f}"
            f"{self.requests:9.1f}{ratio:9.2f}"
        )


def in_turns(ways: dict[str, Callable[[], object]], rounds: int, warm: int = 50) -> dict[str, Figure]:
    """Time each way once a round, so that whatever else the machine does meets all of them alike."""
    figures = {name: Figure(name) for name in ways}
    for n in range(rounds + warm):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            if n >= warm:
                figures[name].seconds.append(time.perf_counter() - began)
    return figures


def heading(text: str) -> None:
    print(f"\n{text}\n  {'':<46}{'p50 us':>9}{'p99 us':>9}{'op/s':>9}{'requests':>9}{'ratio':>9}")


def show(figures: dict[str, Figure]) -> None:
    base = next(iter(figures.values()))
    for figure in figures.values():
        print(figure.line(base))


def fenced_put(etcd: LocalEtcd, rounds: int) -> None:
    wire, bare = Counting(etcd.endpoint), Bare(etcd.endpoint)
    coordinator = over(wire, namespace="bench")
    lease = coordinator.acquire("put", ttl=600)
    lease.put("k", "v" * 100)
    same_shape = _always_true(wire.last)
    before = wire.requests
    figures = in_turns(
        {
            "bare transaction: one compare, one put": bare.compare_and_put,
            "bare transaction of the fenced put's shape": lambda: bare.txn(same_shape, timeout=5),
            "lease.put": lambda: lease.put("k", "v" * 100),
        },
        rounds,
    )
    figures["lease.put"].requests = (wire.requests - before) / (rounds + 50)
    heading("fenced put, in sequence")
    show(figures)
    coordinator.close()


def _always_true(txn: Txn | None) -> Any:
    """The last fenced put as a message whose compares keep holding: its marker compare becomes one of absence."""
    message = pb.TxnRequest.FromString(txn_bytes(txn or Txn((), ())))
    for compare in message.compare:
        if compare.target == pb.Compare.MOD and b"/marker/" in compare.key:
            compare.key, compare.mod_revision = compare.key + b"-absent", 0
    for operation in message.success:
        operation.request_put.key += b"-bare"
    return message


def claim_and_release(etcd: LocalEtcd, rounds: int) -> None:
    wire, bare = Counting(etcd.endpoint), Bare(etcd.endpoint)
    coordinator = over(wire, namespace="bench")
    number = iter(range(1, 10**9))

    def by_hand() -> None:
        lease_id = next(number)
        bare.grant(pb.LeaseGrantRequest(ID=lease_id, TTL=60), timeout=5)
        bare.compare_and_put(b"/bench/owner")
        bare.compare_and_put(b"/bench/owner")
        bare.revoke(pb.LeaseRevokeRequest(ID=lease_id), timeout=5)

    def ours() -> None:
        coordinator.try_acquire("cycle", ttl=60).release()

    before = wire.requests
    figures = in_turns({"bare: grant, two transactions, revoke": by_hand, "try_acquire and release": ours}, rounds)
    figures["bare: grant, two transactions, revoke"].requests = 4
    figures["try_acquire and release"].requests = (wire.requests - before) / (rounds + 50)
    heading("claim and release of one task")
    show(figures)
    before = wire.requests
    lease = coordinator.try_acquire("a new task", ttl=60)
    print(f"  requests for the claim of a new task, grant included: {wire.requests - before}")
    lease.release()
    coordinator.close()


def session_cycle(etcd: LocalEtcd, rounds: int) -> None:
    wire, bare = Counting(etcd.endpoint), Bare(etcd.endpoint)
    with over(wire, namespace="bench") as coordinator, coordinator.session(ttl=600) as session:

        def by_hand() -> None:
            bare.compare_and_put()
            bare.compare_and_put()

        before = wire.requests
        figures = in_turns(
            {"bare: two transactions": by_hand, "session.try_acquire and release": lambda: cycle(session)}, rounds
        )
        figures["bare: two transactions"].requests = 2
        figures["session.try_acquire and release"].requests = (wire.requests - before) / (rounds + 50)
        heading("claim and release in a session")
        show(figures)


def cycle(session: etcdfence.Session) -> None:
    session.try_acquire("cycle").release()


def hand_over(etcd: LocalEtcd, waiters: int, rounds: int) -> None:
    """From one owner's call of release() to the next one's acquire() having returned, down a line of threads."""
    wire, bare = Counting(etcd.endpoint), Bare(etcd.endpoint)
    taken, requests = Figure(f"one hand-over, {waiters} in line"), 0
    with over(wire, namespace="bench") as coordinator, over(wire.again(), namespace="bench") as holder:
        for _ in range(rounds):
            let_go: list[float] = []
            lease = holder.acquire("line", ttl=600)

            def wait(let_go: list[float]) -> None:
                mine = coordinator.acquire("line", ttl=600, wait=600)
                now = time.perf_counter()
                taken.seconds.append(now - let_go[-1])
                let_go.append(time.perf_counter())
                mine.release()

            threads = [threading.Thread(target=wait, args=(let_go,)) for _ in range(waiters)]
            for thread in threads:
                thread.start()
            while len(coordinator.waiters()) < waiters:
                time.sleep(0.05)
            time.sleep(0.2)
            wire.requests = 0
            let_go.append(time.perf_counter())
            lease.release()
            for thread in threads:
                thread.join()
            requests += wire.requests
    taken.requests = requests / (rounds * waiters)
    figures = in_turns({"bare transaction": bare.compare_and_put}, 500)
    heading("hand-over (requests of the waiters: claim, release, revoke, look, and a watch)")
    show({**figures, taken.name: taken})


def renewing(etcd: LocalEtcd, leases: int, ttl: int) -> None:
    wire = Counting(etcd.endpoint)
    coordinator = over(wire, namespace="bench")
    held = [coordinator.try_acquire(f"renew-{n}", ttl=ttl) for n in range(leases)]
    wire.requests, cpu, began = 0, time.process_time(), time.perf_counter()
    time.sleep(2 * ttl)
    took, spent = time.perf_counter() - began, time.process_time() - cpu
    standing = sum(lease.standing is etcdfence.Standing.HELD for lease in held)
    print(
        f"\n{leases} leases renewing, TTL {ttl} s, for {took:.0f} s: {standing} held,"
        f" {wire.requests} requests ({wire.requests / took:.1f} a second), {spent / took:.1%} of one CPU"
    )
    limit = 5.0
    ids = tuple(lease.receipt.lease_id for lease in held)
    began = time.perf_counter()
    wire.call(KeepAlive(ids, limit), limit)
    print(f"  one keepalive exchange for all of them: {(time.perf_counter() - began) * 1000:.0f} ms")
    coordinator.close()


async def _timed(tasks: int, rounds: int, ways: dict[str, Callable[[int], Any]]) -> dict[str, Figure]:
    """Each way by so many tasks at once, in turns; one operation takes the time of a round by their number."""
    figures = {name: Figure(name) for name in ways}
    for n in range(rounds + 3):
        for name, way in ways.items():
            began = time.perf_counter()
            await asyncio.gather(*(way(task) for task in range(tasks)))
            if n >= 3:
                figures[name].seconds.append((time.perf_counter() - began) / tasks)
    return figures


async def fenced_put_async(etcd: LocalEtcd, tasks: int, rounds: int) -> None:
    channel = grpc.aio.insecure_channel(etcd.endpoint.removeprefix("http://"))
    txn = channel.unary_unary(
        "/etcdserverpb.KV/Txn",
        request_serializer=pb.TxnRequest.SerializeToString,
        response_deserializer=pb.TxnResponse.FromString,
    )
    namespace = f"bench-{tasks}"
    wire = Counting(etcd.endpoint)
    synchronous = over(wire, namespace=namespace)
    shape_of = synchronous.acquire("shape", ttl=600)
    shape_of.put("k", "v" * 100)
    same_shape = _always_true(wire.last)
    async with etcdfence.connect_async(etcd.endpoint, namespace=namespace) as coordinator:
        leases = [await coordinator.acquire(f"put-{n}", ttl=600) for n in range(tasks)]
        figures = await _timed(
            tasks,
            rounds,
            {
                "bare grpc.aio stub, the same shape": lambda _: txn(same_shape, timeout=5),
                "await lease.put, a lease for each task": lambda n: leases[n].put(f"k{n}", "v" * 100),
            },
        )
    heading(f"fenced put by {tasks} tasks")
    show(figures)
    await channel.close()
    synchronous.close()


def fenced_put_gateway(etcd: LocalEtcd, rounds: int) -> None:
    client = Etcd3Client(port=etcd.port, host="127.0.0.1", api_path="/v3/")
    client.session.trust_env = False
    recorded: list[Txn] = []
    gateway = GatewayTransport([etcd.endpoint])

    class Recording:
        def call(self, request: Request[Any], within: float) -> Any:
            if isinstance(request, Txn):
                recorded.append(request)
            return gateway.call(request, within)

        interrupt, close = gateway.interrupt, gateway.close

    with over(Recording(), namespace="bench-gateway") as coordinator:
        lease = coordinator.acquire("put", ttl=600)
        lease.put("k", "v" * 100)
        shape = _json.txn(recorded[-1])
        for compare in shape["compare"]:
            if (
                compare["target"] == "MOD"
                and "mod_revision" in compare
                and b"/marker/" in b64decode(compare["key"])
            ):
                compare |= {"key": b64encode(b"/bench/absent").decode(), "mod_revision": "0"}
        for operation in shape["success"]:
            put = operation["request_put"]
            put["key"] = b64encode(b64decode(put["key"]) + b"-bare").decode()
        reply: Any = client.transaction(cast("Any", shape))
        if not reply.get("succeeded"):
            raise RuntimeError("the bare transaction was refused")
        figures = in_turns(
            {
                "etcd3gw.Etcd3Client.transaction": lambda: client.transaction(cast("Any", shape)),
                "lease.put over the gateway": lambda: lease.put("k", "v" * 100),
            },
            rounds,
        )
    heading("fenced put over the gateway, in sequence")
    show(figures)


def exploring() -> None:
    began = time.perf_counter()
    report = explore(replace(CLAIMS, faults=2, events=0))
    took = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"\n{report}\n  {took:.1f} s, {took / report.steps * 1e6:.0f} us a step, at most {peak // 1024} MiB")


def commands(repeats: int) -> None:
    bare_typer = (
        "import typer\napp = typer.Typer(help='bare')\n"
        "@app.command()\ndef one(): ...\n@app.command()\ndef two(): ...\napp()"
    )
    ways = {
        "python -c pass": [sys.executable, "-c", "pass"],
        "import etcdfence": [sys.executable, "-c", "import etcdfence"],
        "a bare Typer program --help": [sys.executable, "-c", bare_typer, "--help"],
        "etcdfence --help": [sys.executable, "-m", "cli", "--help"],
    }

    def starting(words: list[str]) -> Callable[[], object]:
        return lambda: subprocess.run(words, stdout=subprocess.DEVNULL, check=True)

    figures = in_turns({name: starting(words) for name, words in ways.items()}, repeats, warm=3)
    heading("starting a process")
    show(figures)
    help_ratio = statistics.median(figures["etcdfence --help"].seconds) / statistics.median(
        figures["a bare Typer program --help"].seconds
    )
    print(f"  etcdfence --help beside the bare Typer program: {help_ratio:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--leases", type=int, default=1000)
    parser.add_argument("--ttl", type=int, default=9)
    options = parser.parse_args()
    with LocalEtcd() as etcd:
        print(f"etcd {etcd.binary}, Python {sys.version.split()[0]}, grpcio {grpc.__version__}")
        fenced_put(etcd, options.rounds)
        claim_and_release(etcd, options.rounds // 4)
        session_cycle(etcd, options.rounds // 2)
        for waiters in (10, 50, 300):
            hand_over(etcd, waiters, 3)
        renewing(etcd, options.leases, options.ttl)
        for tasks in (1, 8, 64, 256):
            asyncio.run(fenced_put_async(etcd, tasks, max(20, options.rounds // (2 * tasks))))
        fenced_put_gateway(etcd, options.rounds // 2)
    exploring()
    commands(20)


if __name__ == "__main__":
    main()
