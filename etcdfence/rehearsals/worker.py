"""One worker process of a rehearsal: `python -m etcdfence.rehearsals.worker` with its orders as one JSON argument.

It says what happens as JSON lines on standard output. Its step asks a slow model, which here is a line on
standard input: while it waits for that line it is in the middle of its step, and the statement after it is the
write of the result.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import TypeVar, cast

from etcdfence import Lease, OwnershipRefused
from etcdfence._connect import over
from etcdfence._keys import Keys
from etcdfence._requests import Put, Request, Txn, TxnReply
from etcdfence.transports.grpc import GrpcTransport

T = TypeVar("T")
RESULT = "result"


@dataclass(frozen=True, slots=True)
class Orders:
    name: str
    endpoints: tuple[str, ...]
    namespace: str
    task: str
    ttl: int
    wait: float
    fenced: bool


class Overheard:
    """The transport, and what etcd answered to the last transaction that would have put a certain key."""

    def __init__(self, endpoints: tuple[str, ...], key: bytes) -> None:
        self._wire, self._key = GrpcTransport(endpoints), key
        self.answer: TxnReply | None = None

    def call(self, request: Request[T], within: float) -> T:
        reply = self._wire.call(request, within)
        if isinstance(request, Txn) and any(op.key == self._key for op in request.success if isinstance(op, Put)):
            self.answer = cast("TxnReply", reply)
        return reply

    def interrupt(self) -> None:
        self._wire.interrupt()

    def close(self) -> None:
        self._wire.close()


def say(event: str, **facts: object) -> None:
    print(json.dumps({"event": event, **facts}), flush=True)


def main(orders: Orders) -> None:
    key = Keys(orders.namespace).data(RESULT)
    wire = Overheard(orders.endpoints, key)
    with over(wire, namespace=orders.namespace, holder=orders.name) as coordinator:
        lease = coordinator.acquire(orders.task, ttl=orders.ttl, wait=orders.wait)
        say("claimed", generation=lease.generation, token=str(lease.token), ttl=lease.ttl)
        say("asked the model")
        answer = sys.stdin.readline().strip()
        if not answer:  # the rehearsal is gone
            return
        if orders.fenced:
            _fenced(lease, wire, answer)
        else:
            reply = wire.call(Txn((), (Put(key, answer.encode()),)), 5.0)
            say("wrote", succeeded=reply.succeeded, revision=reply.header.revision, value=answer)
        sys.stdin.readline()  # keep the task until the rehearsal has looked at the store
        lease.abandon()


def _fenced(lease: Lease, wire: Overheard, answer: str) -> None:
    try:
        lease.put(RESULT, answer)
        outcome, facts = "wrote", {"value": answer}
    except OwnershipRefused as refused:
        outcome = "was refused"
        facts = {"error": type(refused).__name__, "message": str(refused), "standing": str(lease.standing)}
    reply = wire.answer
    if reply is not None:
        say(outcome, succeeded=reply.succeeded, revision=reply.header.revision, **facts)


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    main(Orders(**{**told, "endpoints": tuple(told["endpoints"])}))
