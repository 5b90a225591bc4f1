"""What an endpoint may look like."""

from __future__ import annotations

from urllib.parse import urlsplit

from etcdfence.errors import Misuse


def host_and_port(endpoint: object) -> str:
    """`host:port` of an endpoint such as `http://127.0.0.1:2379`, `etcd-1:2379` or `http://[::1]:2379`."""
    advice = "write it as http://host:port"
    if not isinstance(endpoint, str) or not endpoint.strip():
        raise Misuse(f"an endpoint must be text such as http://127.0.0.1:2379, not {endpoint!r}")
    text = endpoint.strip()
    url = urlsplit(text if "://" in text else f"http://{text}")
    if url.scheme == "https":
        raise Misuse(f"{text}: TLS is not built yet; this version speaks plain http:// only")
    if url.scheme != "http":
        raise Misuse(f"{text}: the scheme {url.scheme!r} is not an endpoint's; {advice}")
    try:
        host, port = url.hostname, url.port
    except ValueError as error:
        raise Misuse(f"{text}: {error}; {advice}") from error
    if not host or port is None:
        raise Misuse(f"{text}: the {'host' if not host else 'port'} is missing; {advice}")
    if url.path not in ("", "/") or url.query or url.fragment or url.username is not None:
        raise Misuse(f"{text}: an endpoint is only a host and a port; {advice}")
    if any(letter.isspace() for letter in host):
        raise Misuse(f"{text}: a host name has no spaces; {advice}")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
