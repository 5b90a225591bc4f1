"""Which answers of etcd are definite, as one table. What is not in it is ambiguous.

A row is a gRPC status code, a text that the message must contain ("" for any), and the error to raise. The
first row that fits decides. "Definite" means that etcd refused the request before it was proposed, or refused
it whole while applying it (server/etcdserver/v3_server.go, apply.go; api/v3rpc/rpctypes). Two that look
definite are not: "database space exceeded" is returned for requests that were applied (apply/quota.go), and
DEADLINE_EXCEEDED says nothing about the server.
"""

from __future__ import annotations

from typing import Final

from etcdfence.errors import (
    EtcdFenceError,
    LeaseExists,
    LeaseNotFound,
    Misuse,
    OutcomeUnknown,
    PermissionDenied,
    TooLarge,
    Unavailable,
)

Row = tuple[str, str, type[EtcdFenceError]]

TABLE: Final[tuple[Row, ...]] = (
    # refused before it was proposed: the request itself is at fault
    ("INVALID_ARGUMENT", "request is too large", TooLarge),
    ("INVALID_ARGUMENT", "too many operations in txn request", TooLarge),
    ("RESOURCE_EXHAUSTED", "grpc: received message larger than max", TooLarge),
    ("INVALID_ARGUMENT", "revision of auth store is old", PermissionDenied),
    ("INVALID_ARGUMENT", "user name is empty", PermissionDenied),
    ("INVALID_ARGUMENT", "key is not provided", Misuse),
    ("INVALID_ARGUMENT", "value is provided", Misuse),
    ("INVALID_ARGUMENT", "lease is provided", Misuse),
    ("INVALID_ARGUMENT", "duplicate key given in txn request", Misuse),
    ("INVALID_ARGUMENT", "invalid sort option", Misuse),
    ("INVALID_ARGUMENT", "key not found", Misuse),
    ("OUT_OF_RANGE", "too large lease TTL", Misuse),
    # refused before it was proposed: the server cannot take it now
    ("RESOURCE_EXHAUSTED", "etcdserver: too many requests", Unavailable),
    ("UNAVAILABLE", "etcdserver: no leader", Unavailable),
    ("UNKNOWN", "raft proposal dropped", Unavailable),
    ("UNKNOWN", "not a primary lessor", Unavailable),
    ("DATA_LOSS", "corrupt cluster", Unavailable),
    ("FAILED_PRECONDITION", "not capable", Unavailable),
    ("UNAVAILABLE", "not capable", Unavailable),
    ("UNAVAILABLE", "not supported for learner", Unavailable),
    ("FAILED_PRECONDITION", "not supported for learner", Unavailable),
    # refused whole while being applied
    ("NOT_FOUND", "requested lease not found", LeaseNotFound),
    ("FAILED_PRECONDITION", "lease already exists", LeaseExists),
    ("PERMISSION_DENIED", "", PermissionDenied),
    ("UNAUTHENTICATED", "", PermissionDenied),
    # never left this process
    ("UNAVAILABLE", "failed to connect to all addresses", Unavailable),
    ("UNAVAILABLE", "DNS resolution failed", Unavailable),
    ("UNAVAILABLE", "errors resolving", Unavailable),
)


def error_for(code: str, message: str, endpoint: str) -> EtcdFenceError:
    """The error of etcdfence for a status code's name and its message, as `endpoint` gave them."""
    kind = next((row[2] for row in TABLE if row[0] == code and row[1] in message), OutcomeUnknown)
    return kind(f"{endpoint}: {code}: {message or 'no message'}")
