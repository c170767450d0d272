"""A real server of the service in this process, on a port of its own; and one in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from opcast.jobs.service.serve import bound, config_of
from opcast.jobs.service.settings import ServiceSettings
from opcast.simulator.question.sources import Sources


@contextmanager
def running(settings: ServiceSettings, **limits: float) -> Iterator[str]:
    """The address of a server with these settings, and limits of connections, until the end of the block."""
    listening = bound(settings)
    server = uvicorn.Server(config_of(settings, **limits))
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


WATCHED = Path(__file__).with_name("watched.py")


@dataclass(frozen=True)
class OwnServer:
    """A server in a process of its own: where it answers, where it runs, and what it has said."""

    address: str
    process: subprocess.Popen[str]
    folder: Path

    def seen(self) -> list[str]:
        """What it imported, opened or started that it should not."""
        return (self.folder / "seen").read_text().splitlines()

    def said(self) -> str:
        """Its log."""
        return (self.folder / "said").read_text()


@contextmanager
def own_server(folder: Path, *settings: str, **environment: str) -> Iterator[OwnServer]:
    """A server that is watched, started in ``folder / "here"``, until the end of the block."""
    here = folder / "here"
    here.mkdir(parents=True, exist_ok=True)
    (folder / "home").mkdir(exist_ok=True)
    (folder / "seen").touch()
    (folder / "tmp").mkdir(exist_ok=True)
    own = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(here)}
    own |= {"OPCAST_HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp")}
    own.pop("OPCAST_API_TOKEN", None)
    command = [sys.executable, "-P", str(WATCHED), str(folder / "seen"), *settings]
    with (
        (folder / "said").open("w") as said,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=said, text=True, cwd=here, env=own | environment
        ) as process,
    ):
        try:
            yield OwnServer(_address(process), process, folder)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)


def _address(process: subprocess.Popen[str]) -> str:
    text = ""
    assert process.stdout is not None
    while not text.rstrip().endswith("}"):
        line = process.stdout.readline()
        assert line, "the service does not start"
        text += line
    found: str = json.loads(text)["address"]
    return found
