"""A TCP proxy on loopback between a client and etcd: it passes bytes on, swallows answers, or cuts the link."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from typing import Self


class Proxy:
    """`swallow()`: requests arrive, answers do not, connections stay open. `cut()`: connections end, new ones
    are refused as long as the link is cut. `heal()` ends both; swallowed connections are closed then."""

    def __init__(self, target: str) -> None:
        host, port = target.removeprefix("http://").split(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._swallowing = threading.Event()
        self._cut = threading.Event()
        self._closed = threading.Event()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._lock = threading.Lock()
        self.swallowed = 0
        threading.Thread(target=self._accept, name="proxy-accept", daemon=True).start()

    def swallow(self) -> None:
        self._swallowing.set()

    def cut(self) -> None:
        self._cut.set()
        self._drop_all()

    def heal(self) -> None:
        dropping = self._swallowing.is_set()
        self._swallowing.clear()
        self._cut.clear()
        if dropping:  # their byte streams have holes
            self._drop_all()

    def _drop_all(self) -> None:
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for one in (end for pair in pairs for end in pair):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._cut.is_set():
                client.close()
                continue
            try:
                server = socket.create_connection(self._target, timeout=5)
            except OSError:
                client.close()
                continue
            with self._lock:
                self._pairs.append((client, server))
            threading.Thread(target=self._pump, args=(client, server), name="proxy-pump", daemon=True).start()

    def _pump(self, client: socket.socket, server: socket.socket) -> None:
        with client, server, contextlib.suppress(OSError):
            while not self._closed.is_set():
                readable, _, _ = select.select([client, server], [], [], 0.2)
                for source in readable:
                    data = source.recv(65536)
                    if not data:
                        return
                    if source is server and self._swallowing.is_set():
                        self.swallowed += len(data)
                    else:
                        (server if source is client else client).sendall(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._listener.close()
        self._drop_all()
