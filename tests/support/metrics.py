"""How many requests of which kind an etcd has had, by its own count."""

from __future__ import annotations

import re
import urllib.request
from collections import Counter

_STARTED = re.compile(r'^grpc_server_started_total\{.*grpc_method="(\w+)".*\} (\S+)$', re.MULTILINE)


def requests(endpoint: str) -> Counter[str]:
    """By gRPC method; a watch counts once for each stream."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{endpoint}/metrics", timeout=10) as reply:
        return Counter({name: int(float(count)) for name, count in _STARTED.findall(reply.read().decode())})
