"""One trial, in a process of its own: etcdfence and other etcd clients, imported in the order of the arguments.

    python -W error -m tests.support.beside aetcd etcdfence

What another client warns of is its own affair; etcdfence is imported and used with every warning an error. The
trial proves nothing unless the other client took the names that packages collide on, so that is asserted, too.
Prints one line, with the versions that were tried.
"""

from __future__ import annotations

import importlib
import platform
import sys
import warnings
from importlib.metadata import packages_distributions, version
from typing import Final

TAKEN: Final = {"kv.proto": "mvccpb", "auth.proto": "authpb", "rpc.proto": "etcdserverpb"}


def import_etcdfence() -> None:
    package = importlib.import_module("etcdfence")
    for transport in ("grpc", "grpc_aio", "gateway"):
        importlib.import_module(f"etcdfence.transports.{transport}")
    for name in package.__all__:
        getattr(package, name)


def import_other(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module(name)


def assert_the_names_are_taken() -> None:
    from google.protobuf import descriptor_pool

    for file, package in TAKEN.items():
        assert descriptor_pool.Default().FindFileByName(file).package == package, file


def assert_a_transaction_round_trips() -> None:
    from etcdfence._requests import Compare, Put, Range, Target, Txn
    from etcdfence.transports._pb import etcdfence_wire_pb2 as pb
    from etcdfence.transports._wire import txn_bytes

    guard = Compare(Target.MOD, b"owner", 2**62)
    message = pb.TxnRequest(
        compare=[pb.Compare(target=pb.Compare.MOD, key=b"owner", mod_revision=2**62)],
        success=[pb.RequestOp(request_put=pb.PutRequest(key=b"k", value=b"\0v", lease=7))],
        failure=[pb.RequestOp(request_range=pb.RangeRequest(key=b"owner"))],
    )
    sent = txn_bytes(Txn((guard,), (Put(b"k", b"\0v", 7),), (Range(b"owner"),)))
    assert pb.TxnRequest.FromString(sent) == message
    assert pb.TxnRequest.FromString(message.SerializeToString()) == message


def described(module: str) -> str:
    found = packages_distributions().get(module)
    return f"{found[0]} {version(found[0])}" if found else module.rsplit(".", 1)[-1]


def main(names: list[str]) -> None:
    for name in names:
        if name == "etcdfence":
            import_etcdfence()
        else:
            import_other(name)
    if names != ["etcdfence"]:
        assert_the_names_are_taken()
    assert_a_transaction_round_trips()
    from google.protobuf.internal import api_implementation

    print(
        f"{', '.join(map(described, names))}: protobuf {version('protobuf')} ({api_implementation.Type()}),"
        f" grpcio {version('grpcio')}, Python {platform.python_version()}"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
