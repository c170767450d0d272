"""What the service is started with, and what it refuses to start with."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...datasets.reading import read_text
from ...simulator.question.sources import HOME, Sources
from .. import resolve
from ..show import BadInputError

TOKEN = "OPCAST_API_TOKEN"
SHORTEST_TOKEN = 16
COUNTS = {  # setting -> least and most
    "port": (0, 65535),
    "workers": (1, 256),
    "waiting": (0, 10_000),
    "connections": (1, 100_000),
    "batch": (1, 50_000_000),
    "body_mib": (1, 4096),
    "timeout_s": (1, 86_400),
    "search_s": (1, 86_400),
    "follow_s": (1, 86_400),
}


@dataclass(frozen=True)
class ServiceSettings:
    """Where the service listens, who may ask, and how much.

    ``workers`` processes simulate, each one question at a time; ``waiting`` more questions may queue for them.
    ``connections`` requests may be under way at once, of ``body_mib`` each, of at most ``batch`` ops; a question takes
    ``timeout_s`` at most (searches and served loads ``search_s``), and so does the reading of a body. ``allow`` are
    texts that may name code or a file (:mod:`.naming`): paths and hub ids of models, ``module:callable``. Every
    ``follow_s`` seconds the aliases of MLflow at ``follow`` are looked at (:mod:`....models.following`).
    ``calibration`` answers where a call names none, in place of the verb's own.
    """

    host: str = "127.0.0.1"
    port: int = 8321
    token: str | None = field(default=None, repr=False)
    workers: int = 2
    waiting: int = 16
    connections: int = 64
    batch: int = 1_000_000
    body_mib: int = 64
    timeout_s: int = 60
    search_s: int = 600
    allow: tuple[str, ...] = ()
    follow: str | None = None
    follow_s: int = 5
    home: str = HOME
    calibration: str | None = None
    sources: Sources = field(default_factory=Sources)

    @property
    def loopback(self) -> bool:
        """Whether only this machine reaches the service."""
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine's own."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def settings_of(config: Mapping[str, Any]) -> ServiceSettings:
    """The settings of ``opcast api``. BadInputError for a figure out of range, and for a door left open."""
    counts = {name: _count(name, config[name], *bounds) for name, bounds in COUNTS.items()}
    allow = config["allow"] or []
    if not isinstance(allow, list) or not all(isinstance(entry, str) for entry in allow):
        raise BadInputError(f"allow={allow!r} must be a list of names, as allow=[./my_model,org/name,my_engines:make]")
    service = ServiceSettings(
        host=str(config["host"]),
        token=_token(config),
        allow=tuple(allow),
        follow=_followed(config["follow"]),
        home=str(config["home"]),
        calibration=None if config["calibration"] is None else str(config["calibration"]),
        sources=resolve.sources({**config, "calibration": Sources.calibration}),
        **counts,
    )
    if not service.loopback and service.token is None:
        raise BadInputError(
            f"host={service.host} is reached from other machines: set a token in {TOKEN} or token_file=…, "
            "or stay on host=127.0.0.1"
        )
    return service


def _count(name: str, value: Any, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise BadInputError(f"{name}={value!r} must be a whole number from {least:,} to {most:,}")
    return value


def _followed(uri: Any) -> str | None:
    """The MLflow to follow. BadInputError where it is not installed or does not answer."""
    if uri is None:
        return None
    from ...models.tracking import TrackingError, check

    try:
        check(str(uri))
    except TrackingError as error:
        raise BadInputError(f"follow={uri}: {error}") from None
    return str(uri)


def _token(config: Mapping[str, Any]) -> str | None:
    """The token of ``token_file=…``, else of the environment. A word of the command line would show in every ``ps``."""
    if config["token_file"]:
        path = Path(str(config["token_file"])).expanduser()
        token = read_text(path, BadInputError, f"token_file={path}").strip()
        where = f"token_file={path}"
    else:
        token, where = os.environ.get(TOKEN, "").strip(), TOKEN
        if not token:
            return None
    if len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise BadInputError(
            f"{where} must hold at least {SHORTEST_TOKEN} printable characters without spaces; "
            'make one with: python -c "import secrets; print(secrets.token_urlsafe())"'
        )
    return token
