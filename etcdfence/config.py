"""Where settings come from, the same for the library and the command line.

Arguments come first, then the environment (ETCDFENCE_*, then what etcdctl reads), then the chosen context of
the configuration file, then the defaults. The file is `~/.config/etcdfence/config.toml`, or what
`ETCDFENCE_CONFIG` names:

    current = "staging"

    [contexts.staging]
    endpoints = ["http://etcd-1:2379", "http://etcd-2:2379"]
    namespace = "billing"
    data_prefix = "/billing/"
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from etcdfence.errors import Misuse

DEFAULT_ENDPOINTS: Final = ("http://127.0.0.1:2379",)
DEFAULT_NAMESPACE: Final = "default"
_SETTINGS: Final = frozenset({"endpoints", "namespace", "data_prefix", "transport"})


@dataclass(frozen=True, slots=True)
class Settings:
    """`sources` says for each setting where it came from, for messages and `etcdfence status`."""

    endpoints: tuple[str, ...]
    namespace: str
    data_prefix: str
    transport: str
    sources: Mapping[str, str]

    def environment(self) -> dict[str, str]:
        """The same settings as variables, for a process that is to find them."""
        return {
            "ETCDFENCE_ENDPOINTS": ",".join(self.endpoints),
            "ETCDFENCE_NAMESPACE": self.namespace,
            "ETCDFENCE_TRANSPORT": self.transport,
            "ETCDFENCE_DATA_PREFIX": self.data_prefix,
        }


def load(
    *,
    endpoints: str | Sequence[str] | None = None,
    namespace: str | None = None,
    data_prefix: str | None = None,
    transport: str | None = None,
    context: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """Settle every setting. Misuse where a context does not exist or a value has the wrong shape."""
    environ = os.environ if environ is None else environ
    stored, where = _context(context or environ.get("ETCDFENCE_CONTEXT"), environ)
    chosen: dict[str, Any] = {}
    sources: dict[str, str] = {}

    def choose(
        name: str, argument: object, variables: tuple[str, ...], default: object, empty: str | None = None
    ) -> None:
        candidates = [("argument", argument)]
        candidates += [
            (f"${variable}", environ.get(variable) or empty) for variable in variables if variable in environ
        ]
        candidates += [(where, stored.get(name)), ("default", default)]
        sources[name], chosen[name] = next(found for found in candidates if found[1] is not None)

    choose("endpoints", endpoints, ("ETCDFENCE_ENDPOINTS", "ETCDCTL_ENDPOINTS"), DEFAULT_ENDPOINTS)
    choose("namespace", namespace, ("ETCDFENCE_NAMESPACE",), DEFAULT_NAMESPACE)
    choose("transport", transport, ("ETCDFENCE_TRANSPORT",), "grpc")
    choose("data_prefix", data_prefix, ("ETCDFENCE_DATA_PREFIX",), "below the namespace", "")
    for name in ("namespace", "data_prefix", "transport"):
        if not isinstance(chosen[name], str):
            raise Misuse(f"{name} (from {sources[name]}) must be text, not {chosen[name]!r}")
    if not chosen["namespace"]:
        raise Misuse(f"namespace (from {sources['namespace']}) must not be empty")
    if chosen["transport"] not in ("grpc", "gateway"):
        raise Misuse(
            f"transport {chosen['transport']!r} (from {sources['transport']}) is unknown; use 'grpc' or 'gateway'"
        )
    return Settings(
        endpoints=_endpoints(chosen["endpoints"], sources["endpoints"]),
        namespace=chosen["namespace"],
        data_prefix="" if sources["data_prefix"] == "default" else chosen["data_prefix"],
        transport=chosen["transport"],
        sources=sources,
    )


def _endpoints(value: object, source: str) -> tuple[str, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    if (
        not isinstance(parts, Sequence)
        or not parts
        or not all(isinstance(part, str) and part.strip() for part in parts)
    ):
        raise Misuse(f"endpoints (from {source}) must be text such as http://127.0.0.1:2379, not {value!r}")
    return tuple(part.strip() for part in parts)


def _context(name: str | None, environ: Mapping[str, str]) -> tuple[dict[str, Any], str]:
    path = Path(environ.get("ETCDFENCE_CONFIG") or _default_path(environ))
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if name or environ.get("ETCDFENCE_CONFIG"):
            raise Misuse(f"there is no configuration file {path}") from error
        return {}, str(path)
    except (tomllib.TOMLDecodeError, ValueError, OSError) as error:
        raise Misuse(f"{path} cannot be read: {error}") from error
    contexts = document.get("contexts", {})
    name = name or document.get("current")
    if name is None:
        return {}, str(path)
    if not isinstance(name, str):
        raise Misuse(f"{path}: current must name a context, not {name!r}")
    if not isinstance(contexts, dict):
        raise Misuse(f"{path}: contexts must be tables such as [contexts.{name}], not {contexts!r}")
    if not isinstance(contexts.get(name), dict):
        raise Misuse(f"{path} has no context {name!r}; it has: {', '.join(sorted(contexts)) or 'none'}")
    unknown = set(contexts[name]) - _SETTINGS
    if unknown:
        raise Misuse(f"{path}, context {name!r}: unknown setting {sorted(unknown)[0]!r}")
    return contexts[name], f"context {name!r} of {path}"


def _default_path(environ: Mapping[str, str]) -> Path:
    base = environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(base) / "etcdfence" / "config.toml"
