"""What an endpoint may look like."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import SplitResult, urlsplit

from etcdfence.errors import Misuse

_HOST: Final = re.compile(r"[A-Za-z0-9._-]+|[0-9A-Fa-f:.]+")
_ADVICE: Final = "write it as http://host:port"


def host_and_port(endpoint: object) -> str:
    """`host:port` of an endpoint such as `http://127.0.0.1:2379`, `etcd-1:2379` or `http://[::1]:2379`."""
    if not isinstance(endpoint, str) or not endpoint.strip():
        raise Misuse(f"an endpoint must be text such as http://127.0.0.1:2379, not {endpoint!r}")
    text = endpoint.strip()
    try:
        url = urlsplit(text if "://" in text else f"http://{text}")
        host, port = url.hostname, url.port
    except ValueError as error:
        raise Misuse(f"{text!r}: {error}; {_ADVICE}") from error
    wrong = _wrong(url, host, port)
    if wrong:
        raise Misuse(f"{text!r}: {wrong}")
    return f"[{host}]:{port}" if ":" in (host or "") else f"{host}:{port}"


def _wrong(url: SplitResult, host: str | None, port: int | None) -> str | None:
    if url.scheme == "https":
        return "TLS is not built yet; this version speaks plain http:// only"
    if url.scheme != "http":
        return f"the scheme {url.scheme!r} is not an endpoint's; {_ADVICE}"
    if not host or not port:
        return f"the {'port' if host else 'host'} is missing; {_ADVICE}"
    if not _HOST.fullmatch(host):
        return f"{host!r} is no host name or address; {_ADVICE}"
    if url.path not in ("", "/") or url.query or url.fragment or url.username is not None:
        return f"an endpoint is only a host and a port; {_ADVICE}"
    return None
