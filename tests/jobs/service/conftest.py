"""A real server of the service in this process, on a port of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import uvicorn

from opcast.jobs.service.app import create_app
from opcast.jobs.service.serve import bound
from opcast.jobs.service.settings import ServiceSettings
from opcast.simulator.question.sources import Sources


@contextmanager
def running(settings: ServiceSettings) -> Iterator[str]:
    """The address of a server with these settings, until the end of the block."""
    listening = bound(settings)
    server = uvicorn.Server(uvicorn.Config(create_app(settings), log_level="warning", server_header=False))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


@pytest.fixture(scope="package")
def home(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="package")
def serve(home: str) -> Callable[..., Any]:
    """A function: settings -> a context with the address of a server that has them."""
    usual = {"port": 0, "sources": Sources.at(home)}
    return lambda **settings: running(ServiceSettings(**{**usual, **settings}))


@pytest.fixture(scope="package")
def address(serve: Callable[..., Any]) -> Iterator[str]:
    """The server that most tests ask."""
    with serve(workers=1) as found:
        yield found


@pytest.fixture
def client(address: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=address, timeout=60) as made:
        yield made
