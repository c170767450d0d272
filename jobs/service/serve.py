"""``opcast api``: start the HTTP service and say where it listens."""

from __future__ import annotations

from typing import Any

from ...datasets.installing import install_command
from ..show import BadInputError, print_json, say, wants_json
from .settings import ServiceSettings, settings_of

BACKLOG = 1024
GRACE_S = 10  # that requests under way are given when the service is told to stop


def run(config: dict[str, Any]) -> int:
    """Serve until Ctrl-C or SIGTERM; returns the exit code."""
    as_json = wants_json(config)
    settings = settings_of(config)
    try:
        import uvicorn

        server = uvicorn.Server(config_of(settings))
    except ImportError as error:
        raise BadInputError(f"the service needs {error.name}: {install_command('api')}") from None
    listening = bound(settings)
    host, port = listening.getsockname()[:2]
    address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    if as_json:
        print_json({"address": address, "token": settings.token is not None})
    say(f"opcast answers at {address} (page), {address}/docs (all calls); stop it with Ctrl-C")
    server.run(sockets=[listening])
    return 0


def config_of(settings: ServiceSettings, **limits: float) -> Any:
    """How uvicorn serves; ``limits`` are those of :func:`.connections.timed`. ImportError where it is not installed."""
    import uvicorn

    from .app import create_app
    from .connections import timed

    return uvicorn.Config(
        create_app(settings),
        http=timed(**limits),
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=GRACE_S,
        timeout_keep_alive=30,
        h11_max_incomplete_event_size=64 * 1024,
    )


def bound(settings: ServiceSettings) -> Any:
    """The listening socket. BadInputError for an address that cannot be had."""
    import socket

    try:
        kind, _, _, _, address = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0]
        bound_socket = socket.socket(kind)
        bound_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound_socket.bind(address)
        bound_socket.listen(BACKLOG)  # who comes before the service has started waits for it
    except OSError as error:
        why = error.strerror or error
        raise BadInputError(f"host={settings.host} port={settings.port} cannot be had: {why}; name another") from None
    bound_socket.set_inheritable(True)
    return bound_socket
