"""Pure decisions: names, timing, states, error codes, records, settings. No server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etcdfence import _keys, _states, _timing, config, errors
from etcdfence._flows.fencing import Lane
from etcdfence._keys import Keys, parse_segment, task_segment
from etcdfence._records import AttemptRecord, EpochRecord, OwnerRecord, Unreadable, owner_of, read
from etcdfence._requests import Compare, KeyValue, Target
from etcdfence._txns import Change, Ending, Evidence, Tenure
from etcdfence.errors import Misuse
from etcdfence.model import Guard, Loss, LossReason, Standing, TaskKey, TaskState, Verdict
from etcdfence.transports import codes
from etcdfence.transports.endpoints import host_and_port

README = Path(__file__).parents[2] / "README.md"

# --- names -------------------------------------------------------------------------------------------------

text = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), min_size=1, max_size=60)
task_names = text | st.builds(TaskKey, text, text, st.integers(1, 10**6))


@pytest.mark.field(39)
@given(task_names, task_names)
def test_a_name_is_one_segment_and_no_two_share_it(one: Any, other: Any) -> None:
    segment = task_segment(one)
    assert "/" not in segment
    assert segment.isascii()
    assert segment.isprintable()
    assert parse_segment(segment) == one
    assert (segment == task_segment(other)) == (one == other)


@given(st.builds(TaskKey, text, text, st.integers(1, 10**6)))
def test_a_task_key_can_be_written_down_and_read_back(key: TaskKey) -> None:
    assert TaskKey.parse(str(key)) == key


@pytest.mark.parametrize("text", ["a", "a:b", "a:b:1", "a:b:v0", ":b:v1", "a::v1", "a:b:v1:c"])
def test_what_is_no_task_key(text: str) -> None:
    with pytest.raises(Misuse):
        TaskKey.parse(text)


@pytest.mark.parametrize("version", [0, -1, "1", None, True, 1.0])
def test_versions_count_from_one(version: Any) -> None:
    with pytest.raises(Misuse):
        TaskKey("op", "scope", version)


@given(task_names, task_names)
def test_a_scan_of_one_task_sees_no_other(one: Any, other: Any) -> None:
    keys = Keys("n")
    mine, theirs = keys.task(one), keys.task(other)
    inside = mine.attempts <= theirs.attempt("a") < _keys.prefix_end(mine.attempts)
    assert inside == (one == other)


# --- timing ------------------------------------------------------------------------------------------------


@given(st.integers(1, 10**6), st.floats(0, 1e9))
def test_renewals_fit_into_the_ttl(granted: int, sent: float) -> None:
    rhythm = _timing.Rhythm.of(granted, granted)
    deadline, due = rhythm.deadline(sent), rhythm.next_renewal(sent)
    assert sent < due < deadline < sent + granted
    # One try that hangs for both its requests leaves time for another before the deadline.
    if granted >= 2:
        limit = _timing.request_limit(due, granted, [deadline])
        assert due + 2 * limit + _timing.retry_delay(0, granted) < deadline


@given(st.integers(1, 100), st.floats(0, 200))
def test_a_round_ends_before_a_deadline_passes_unnoticed(granted: int, now: float) -> None:
    deadline = 100.0
    limit = _timing.request_limit(now, granted, [deadline])
    assert limit >= 0.1
    assert now + 2 * limit <= max(deadline, now + 0.2) + 1e-6


@pytest.mark.req("S2-31")
@pytest.mark.parametrize(
    ("now", "loss", "released", "expected"),
    [
        (9.9, None, False, Standing.HELD),
        (10.0, None, False, Standing.UNVERIFIED),
        (9.9, Loss(LossReason.REVOKED), False, Standing.LOST),
        (99.0, Loss(LossReason.REVOKED), False, Standing.LOST),
        (9.9, None, True, Standing.RELEASED),
        (9.9, Loss(LossReason.REVOKED), True, Standing.LOST),
    ],
)
def test_standing(now: float, loss: Loss | None, released: bool, expected: Standing) -> None:
    assert _timing.standing(now, 10.0, loss, released) is expected


def test_revoked_or_expired() -> None:
    assert _timing.surely_revoked(now=14.9, renewed=10.0, granted=5)
    assert not _timing.surely_revoked(now=15.0, renewed=10.0, granted=5)


# --- states ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("owned", "last_ended", "closed", "expected"),
    [
        (False, None, None, TaskState.WAITING),
        (False, True, None, TaskState.WAITING),
        (False, False, None, TaskState.STALLED),
        (True, False, None, TaskState.OWNED),
        (False, True, "completed", TaskState.COMPLETED),
        (False, True, "failed", TaskState.FAILED),
        (False, False, "cancelled", TaskState.CANCELLED),
    ],
)
def test_a_state_is_derived(owned: bool, last_ended: bool | None, closed: str | None, expected: TaskState) -> None:
    assert _states.task_state(owned=owned, last_ended=last_ended, closed=closed) is expected


def test_every_state_is_in_the_table_and_closed_ones_are_final() -> None:
    assert set(_states.TRANSITIONS) == set(TaskState)
    reached = {after for events in _states.TRANSITIONS.values() for after in events.values()}
    assert reached == set(TaskState) - {TaskState.CANCELLED}
    for state in (TaskState.COMPLETED, TaskState.FAILED, TaskState.CANCELLED):
        assert _states.TRANSITIONS[state] == {}


def test_the_readme_shows_the_table() -> None:
    assert _states.table() in README.read_text(encoding="utf-8")


# --- error codes -------------------------------------------------------------------------------------------

DEFINITE = [
    ("INVALID_ARGUMENT", "etcdserver: request is too large", errors.TooLarge),
    ("INVALID_ARGUMENT", "etcdserver: too many operations in txn request", errors.TooLarge),
    ("RESOURCE_EXHAUSTED", "grpc: received message larger than max (2097999 vs. 2097152)", errors.TooLarge),
    ("INVALID_ARGUMENT", "etcdserver: revision of auth store is old", errors.PermissionDenied),
    ("INVALID_ARGUMENT", "etcdserver: user name is empty", errors.PermissionDenied),
    ("INVALID_ARGUMENT", "etcdserver: key is not provided", errors.Misuse),
    ("INVALID_ARGUMENT", "etcdserver: value is provided", errors.Misuse),
    ("INVALID_ARGUMENT", "etcdserver: lease is provided", errors.Misuse),
    ("INVALID_ARGUMENT", "etcdserver: duplicate key given in txn request", errors.Misuse),
    ("INVALID_ARGUMENT", "etcdserver: invalid sort option", errors.Misuse),
    ("INVALID_ARGUMENT", "etcdserver: key not found", errors.Misuse),
    ("OUT_OF_RANGE", "etcdserver: too large lease TTL", errors.Misuse),
    ("RESOURCE_EXHAUSTED", "etcdserver: too many requests", errors.Unavailable),
    ("UNAVAILABLE", "etcdserver: no leader", errors.Unavailable),
    ("UNKNOWN", "raft proposal dropped", errors.Unavailable),
    ("UNKNOWN", "lease: not a primary lessor", errors.Unavailable),
    ("DATA_LOSS", "etcdserver: corrupt cluster", errors.Unavailable),
    ("NOT_FOUND", "etcdserver: requested lease not found", errors.LeaseNotFound),
    ("FAILED_PRECONDITION", "etcdserver: lease already exists", errors.LeaseExists),
    ("PERMISSION_DENIED", "etcdserver: permission denied", errors.PermissionDenied),
    ("UNAUTHENTICATED", "etcdserver: invalid auth token", errors.PermissionDenied),
    ("UNAVAILABLE", "failed to connect to all addresses; last error: refused", errors.Unavailable),
]
AMBIGUOUS = [
    ("DEADLINE_EXCEEDED", "Deadline Exceeded"),
    ("CANCELLED", "Channel closed!"),
    ("UNAVAILABLE", "etcdserver: request timed out"),
    ("UNAVAILABLE", "etcdserver: request timed out, possibly due to previous leader failure"),
    ("UNAVAILABLE", "etcdserver: request timed out, possibly due to connection lost"),
    ("UNAVAILABLE", "etcdserver: leader changed"),
    ("UNAVAILABLE", "etcdserver: server stopped"),
    ("UNAVAILABLE", "Socket closed"),
    ("UNAVAILABLE", "recvmsg:Connection reset by peer"),
    ("UNAVAILABLE", "keepalive watchdog timeout"),
    ("RESOURCE_EXHAUSTED", "etcdserver: mvcc: database space exceeded"),
    ("OUT_OF_RANGE", "etcdserver: mvcc: required revision has been compacted"),
    ("UNKNOWN", "context deadline exceeded"),
    ("INTERNAL", "stream removed"),
    ("UNKNOWN", ""),
    ("INVALID_ARGUMENT", "something that a newer etcd says"),
]


@pytest.mark.req("promise-4")
@pytest.mark.parametrize(("code", "message", "kind"), DEFINITE)
def test_a_definite_answer(code: str, message: str, kind: type[Exception]) -> None:
    assert type(codes.error_for(code, message, "http://h:1")) is kind


@pytest.mark.req("promise-4")
@pytest.mark.field(29)
@pytest.mark.parametrize(("code", "message"), AMBIGUOUS)
def test_everything_else_is_ambiguous(code: str, message: str) -> None:
    assert type(codes.error_for(code, message, "http://h:1")) is errors.OutcomeUnknown


def test_every_row_of_the_table_is_tried() -> None:
    tried = {
        next(row for row in codes.TABLE if row[0] == code and row[1] in message) for code, message, _ in DEFINITE
    }
    untried = {row[1] for row in set(codes.TABLE) - tried}
    assert untried == {
        "not capable",
        "not supported for learner",
        "DNS resolution failed",
        "errors resolving",
    }


def test_every_exception_has_advice_and_a_family() -> None:
    families = (errors.Refused, errors.Unavailable, errors.OutcomeUnknown, errors.Misuse)
    for name, kind in vars(errors).items():
        if (
            isinstance(kind, type)
            and issubclass(kind, errors.EtcdFenceError)
            and kind is not errors.EtcdFenceError
        ):
            assert issubclass(kind, families), name
            assert kind.advice.endswith("."), name


# --- endpoints and settings --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endpoint", "expected"),
    [
        ("http://127.0.0.1:2379", "127.0.0.1:2379"),
        ("etcd-1:2379", "etcd-1:2379"),
        (" http://etcd.example:2379/ ", "etcd.example:2379"),
        ("http://[::1]:2379", "[::1]:2379"),
    ],
)
def test_endpoints(endpoint: str, expected: str) -> None:
    assert host_and_port(endpoint) == expected


def test_settings_default() -> None:
    found = config.load(environ={"HOME": "/nonexistent", "XDG_CONFIG_HOME": "/nonexistent"})
    assert (found.endpoints, found.namespace, found.data_prefix) == (("http://127.0.0.1:2379",), "default", "")
    assert set(found.sources.values()) == {"default"}


@pytest.mark.parametrize(
    "content",
    [
        "not toml",
        "[contexts.a]\nendpoint = 'x'",
        "[contexts.a]\nnamespace = 7",
        "[contexts.a]\nendpoints = 7",
        "[contexts.a]\ntransport = 'carrier pigeon'",
        "contexts = 3",
        "[contexts.a]\nnamespace = ''",
        "[contexts.a]\nendpoints = []",
    ],
)
def test_a_wrong_configuration_file_is_named(content: str, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(content)
    with pytest.raises(Misuse, match=r"config\.toml"):
        config.load(context="a", environ={"ETCDFENCE_CONFIG": str(path)})


# --- records -----------------------------------------------------------------------------------------------


def stored(value: bytes, key: bytes = b"/k", revision: int = 5, lease: int = 0) -> KeyValue:
    return KeyValue(key, value, revision, revision, 1, lease)


def test_unknown_fields_survive_a_rewrite() -> None:
    record = read(EpochRecord, stored(b'{"format":1,"number":3,"id":"x","added":{"later":true}}'))
    assert isinstance(record, EpochRecord)
    assert b'"added":{"later":true}' in record.model_copy(update={"number": 4}).to_bytes()


@pytest.mark.parametrize(
    "value", [b"", b"null", b"[]", b'{"number":"x"}', b"\xff", b'{"format":2,"number":1,"id":"x"}']
)
def test_an_unreadable_record_says_why(value: bytes) -> None:
    found = read(EpochRecord, stored(value))
    assert isinstance(found, Unreadable)
    assert found.why


def test_an_unreadable_owner_still_owns() -> None:
    owner = owner_of(stored(b"rubbish", revision=9, lease=4))
    assert (owner.generation, owner.lease_id) == (9, 4)
    assert isinstance(read(OwnerRecord, stored(b"rubbish")), Unreadable)


# --- what a refused commit settles -------------------------------------------------------------------------


def lane(seen: int, *unsettled: str) -> Lane:
    attempt = AttemptRecord(attempt="mine", holder="h", host="h", pid=1, lease="7", started="now")
    tenure = Tenure(Keys("n").task("t"), Guard(b"o", 5, 7, b"e", b"v"), attempt, 1, 10, 0.0, 1)
    return Lane(tenure, 0.0, seen, list(unsettled))


def evidence(marker: KeyValue | None, attempt: bytes | None = b"{}") -> Evidence:
    return Evidence(20, None, None, marker, stored(attempt) if attempt is not None else None, None)


ENDED = (
    b'{"attempt":"mine","holder":"h","host":"h","pid":1,"lease":"7","started":"s",'
    b'"ended":{"how":"released","at":"t","write":"w2","generation":5}}'
)


@pytest.mark.req("promise-3", "promise-4")
@pytest.mark.parametrize(
    ("seen", "marker", "attempt", "holds", "expected", "seen_after"),
    [
        # the marker holds one of the ids: that one was applied, the other can never be
        (3, stored(b"w1", revision=9), b"{}", True, {"w1": "applied", "w2": "not_applied"}, 9),
        (3, stored(b"w2", revision=9), b"{}", False, {"w1": "not_applied", "w2": "applied"}, 9),
        # a stranger's id: one of ours may have been before it
        (3, stored(b"xx", revision=9), b"{}", True, {"w1": "unknown", "w2": "unknown"}, 9),
        # as before
        (3, stored(b"w0", revision=3), b"{}", True, {}, 3),
        (3, stored(b"w0", revision=3), b"{}", False, {"w1": "not_applied", "w2": "not_applied"}, 3),
        # never made, or trimmed together with its attempt
        (0, None, b"{}", True, {}, 0),
        (0, None, b"{}", False, {"w1": "not_applied", "w2": "not_applied"}, 0),
        (0, None, None, False, {"w1": "unknown", "w2": "unknown"}, 0),
        # made and gone
        (3, None, b"{}", False, {"w1": "unknown", "w2": "unknown"}, 0),
        # the attempt was ended by one of them
        (3, None, ENDED, False, {"w1": "not_applied", "w2": "applied"}, 0),
    ],
)
def test_what_a_refused_commit_settles(
    seen: int,
    marker: KeyValue | None,
    attempt: bytes | None,
    holds: bool,
    expected: dict[str, str],
    seen_after: int,
) -> None:
    one = lane(seen, "w1", "w2")
    one.endings["w2"] = Ending("released")
    one.learn(evidence(marker, attempt), holds)
    assert {write_id: fate.verdict for write_id, fate in one.fates.items()} == expected
    assert one.unsettled == ([] if expected else ["w1", "w2"])
    assert one.seen == seen_after
    assert (one.ended is not None) == (expected.get("w2") == "applied")


def test_verdicts_do_not_pile_up() -> None:
    one = lane(0)
    for n in range(3000):
        one.sending(Change(f"w{n}"))
        one.decide(Verdict.NOT_APPLIED)
    assert len(one.fates) == 1000
    assert "w2999" in one.fates


def test_a_compare_without_a_matching_operand_is_a_bug() -> None:
    from etcdfence._requests import Txn
    from etcdfence.transports import _wire

    with pytest.raises(TypeError):
        _wire.txn_bytes(Txn((Compare(Target.MOD, b"k", b"5"),), ()))
