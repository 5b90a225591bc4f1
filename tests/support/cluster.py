"""Three etcd members on loopback."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Self

from etcdfence._requests import Members
from etcdfence.server import LocalEtcd, free_ports
from etcdfence.transports.grpc import GrpcTransport

from .releases import newest
from .waiting import eventually


class Cluster:
    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="etcdfence-cluster-")
        ports = free_ports(6)
        peers = ports[3:]
        names = ",".join(f"m{i}=http://127.0.0.1:{port}" for i, port in enumerate(peers))
        self.members = [
            Member(i, newest(), Path(self._directory.name) / f"m{i}", ports[i], peers[i], names) for i in range(3)
        ]

    @property
    def endpoints(self) -> list[str]:
        return [member.endpoint for member in self.members]

    def leader(self) -> int:
        """The index of the present leader."""
        wire = GrpcTransport(self.endpoints)
        try:
            found = wire.call(Members(), 5.0)
        finally:
            wire.close()
        return next(i for i, member in enumerate(found) if member.leader)

    def __enter__(self) -> Self:
        for member in self.members:
            member.launch()
        for member in self.members:
            eventually(f"{member.endpoint} is healthy", member.healthy, 30)
        return self

    def __exit__(self, *_: object) -> None:
        for member in self.members:
            member.stop()
        self._directory.cleanup()


class Member(LocalEtcd):
    def __init__(self, index: int, binary: Path, directory: Path, port: int, peer: int, names: str) -> None:
        super().__init__(
            binary=binary,
            data_dir=directory,
            port=port,
            flags=[
                f"--name=m{index}",
                f"--listen-peer-urls=http://127.0.0.1:{peer}",
                f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}",
                f"--initial-cluster={names}",
                "--initial-cluster-token=etcdfence-test",
            ],
        )
