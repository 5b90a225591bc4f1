"""A wire to a real etcd on which single requests can be lost, answered to nobody, or delivered much later.

Every request that goes through really reaches etcd; only when, and who hears the answer, is up to the test.
`without` takes safeguards out of the transactions on their way, for ablation tests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar, cast

from etcdfence._requests import Compare, KeepAlive, Put, Request, Txn
from etcdfence.errors import OutcomeUnknown
from etcdfence.transports.grpc import GrpcTransport

T = TypeVar("T")
Match = Callable[[Request[Any]], bool]
Fault = Callable[["Tape", Request[Any], float], Any]


class Tape:
    def __init__(self, endpoint: str) -> None:
        self.wire = GrpcTransport([endpoint])
        self.sent: list[Request[Any]] = []
        self.delayed: list[Request[Any]] = []
        self.without: Callable[[Compare], bool] = lambda _: False
        self._faults: list[tuple[Match, Fault, bool]] = []
        self._lock = threading.Lock()

    def call(self, request: Request[T], within: float) -> T:
        if isinstance(request, Txn):
            kept = tuple(compare for compare in request.compares if not self.without(compare))
            request = cast("Any", replace(request, compares=kept))
        with self._lock:
            self.sent.append(request)
            hit = next((one for one in self._faults if one[0](request)), None)
            if hit is not None and hit[2]:
                self._faults.remove(hit)
        if hit is not None:
            return cast("T", hit[1](self, request, within))
        return self.wire.call(request, within)

    def interrupt(self) -> None:
        self.wire.interrupt()

    def close(self) -> None:
        self.wire.close()

    # --- faults --------------------------------------------------------------------------------------------

    def fault(self, match: Match, act: Fault, *, once: bool = True) -> None:
        self._faults.append((match, act, once))

    def lose_reply(self, match: Match, *, once: bool = True) -> None:
        """Applied by etcd, but nobody hears of it."""

        def act(tape: Tape, request: Request[Any], within: float) -> Any:
            tape.wire.call(request, within)
            raise OutcomeUnknown("the reply was lost on its way")

        self.fault(match, act, once=once)

    def delay(self, match: Match, *, once: bool = True) -> None:
        """Held back; its sender hears nothing. `deliver` brings it to etcd."""

        def act(tape: Tape, request: Request[Any], _within: float) -> Any:
            tape.delayed.append(request)
            raise OutcomeUnknown("no answer in time")

        self.fault(match, act, once=once)

    def raises(self, match: Match, error: Exception, *, once: bool = True) -> None:
        def act(_tape: Tape, _request: Request[Any], _within: float) -> Any:
            raise error

        self.fault(match, act, once=once)

    def heal(self) -> None:
        with self._lock:
            self._faults.clear()

    def deliver(self) -> list[Any]:
        """The delayed requests arrive at last, in their order; etcd's answers, or what it raised."""
        answers: list[Any] = []
        for request in self.delayed:
            try:
                answers.append(self.wire.call(request, 5.0))
            except Exception as error:  # the test looks at it
                answers.append(error)
        self.delayed.clear()
        return answers

    def keepalives(self) -> list[int]:
        """All lease ids in keepalives so far."""
        return [
            lease for request in list(self.sent) if isinstance(request, KeepAlive) for lease in request.lease_ids
        ]


def puts(part: bytes) -> Match:
    """Transactions that would put a key which contains this."""
    return lambda request: (
        isinstance(request, Txn)
        and any(part in operation.key for operation in request.success if isinstance(operation, Put))
    )


def is_claim(request: Request[Any]) -> bool:
    return puts(b"/owner/")(request)


def is_seal(request: Request[Any]) -> bool:
    return (
        isinstance(request, Txn)
        and not is_claim(request)
        and any(
            isinstance(operation, Put) and b'"sealed":true' in operation.value for operation in request.success
        )
    )


def a(kind: type[Request[Any]]) -> Match:
    return lambda request: isinstance(request, kind)
