"""Clients that are slow, many, or leave: they are let go, and others are answered."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import numpy as np
import pyarrow as pa
import pytest

from opcast.jobs.service.guard import ARROW
from opcast.jobs.service.settings import ServiceSettings
from opcast.simulator.question.sources import Sources

from .conftest import own_server, running

OP = {"op": {"kind": "gemm", "m": 64, "n": 64, "k": 64}, "device": "h100_sxm"}
HEAD = "POST /v1/predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {}\r\n"


@contextmanager
def connected(address: str, text: str = "", count: int = 1) -> Iterator[list[socket.socket]]:
    """So many connections that have sent the same text."""
    place = urlsplit(address)
    with ExitStack() as stack:
        made = []
        for _ in range(count):
            made.append(stack.enter_context(socket.create_connection((place.hostname, place.port), timeout=20)))
            made[-1].sendall(text.encode())
        yield made


def arrow_table(rows: int) -> bytes:
    """So many products as an Arrow stream."""
    table = pa.table({"m": np.arange(1, rows + 1), "n": np.full(rows, 64), "k": np.full(rows, 64)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def ended(connection: socket.socket) -> bool:
    """Whether the other side has let go, within the connection's patience."""
    try:
        while connection.recv(65536):
            pass
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False
    return True


@pytest.fixture
def settings(home: str) -> ServiceSettings:
    return ServiceSettings(port=0, sources=Sources.at(home), workers=1, connections=4)


def test_a_head_that_does_not_come_is_let_go(settings: ServiceSettings) -> None:
    """Neither at the start, nor after an answer, nor after an answer that came before the body was whole."""
    whole = HEAD.format("text/plain") + "Content-Length: 100\r\n\r\n{"  # answered 415 at once
    answered = "GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    with running(settings, head_s=0.5) as address:
        for text in ("", "POST /v1/pre", answered, whole):
            with connected(address, text) as (slow,):
                if text in (answered, whole):
                    slow.recv(4096)
                    slow.sendall(b"G")  # it goes on, a byte now and then
                assert ended(slow), text
        with httpx.Client(base_url=address) as patient:  # whole requests on a kept connection
            for _ in range(2):
                assert patient.post("/v1/predict", json=OP).status_code == 200
                time.sleep(0.7)


def test_many_that_ask_nothing_keep_nobody_out(settings: ServiceSettings) -> None:
    """The oldest of them are let go for those that come."""
    with running(settings, most=20) as address, connected(address, "GET /he", 60) as slow:
        assert httpx.post(f"{address}/v1/predict", json=OP).status_code == 200
        assert all(ended(each) for each in slow[:30])


def test_bodies_that_come_slowly_keep_nobody_out(settings: ServiceSettings) -> None:
    head = HEAD.format("application/json") + "Content-Length: 1000\r\n\r\n{"
    with running(settings) as address, connected(address, head, 12):
        for _ in range(3):
            assert httpx.post(f"{address}/v1/predict", json=OP).status_code == 200


def test_bodies_in_memory_are_bounded_together(home: str) -> None:
    """Of many large bodies at once, those that find no room are told to come again."""
    settings = ServiceSettings(port=0, sources=Sources.at(home), body_mib=1)
    head = HEAD.format("application/json") + f"Content-Length: {2**20}\r\n\r\n" + " " * (2**20 - 1)
    with running(settings) as address, connected(address, head, 4):
        deadline = time.monotonic() + 20
        found = 200
        while found != 429 and time.monotonic() < deadline:
            found = httpx.post(f"{address}/v1/predict", json={**OP, "backend": None}).status_code
        with connected(address, head) as (more,):
            assert b" 429 " in more.recv(4096)


def test_an_answer_that_nobody_takes_is_let_go(settings: ServiceSettings) -> None:
    body = arrow_table(60_000)
    head = HEAD.format(ARROW).replace("predict", "predict/table?kind=gemm&device=h100_sxm")
    with running(settings, take_s=1.0) as address, socket.socket() as slow:
        place = urlsplit(address)
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.settimeout(20)
        slow.connect((place.hostname, place.port))
        slow.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        for _ in range(200):
            text = httpx.get(f"{address}/metrics").text
            if 'opcast_requests_total{route="/v1/predict/table",status="200"} 1.0' in text:
                return
            time.sleep(0.1)
    pytest.fail("the answer still waits for who does not read it")


def test_a_crowd_is_answered_or_told_to_come_again(settings: ServiceSettings) -> None:
    """200 clients at once: none waits in vain, none fails, and the service goes on."""
    with running(settings) as address:
        body = json.dumps(OP)
        whole = HEAD.format("application/json") + f"Content-Length: {len(body)}\r\n\r\n{body}"
        with connected(address, whole, 200) as crowd:
            found = [each.recv(65536) for each in crowd]
        assert {each[:13] for each in found} <= {b"HTTP/1.1 200 ", b"HTTP/1.1 429 "}
        assert all(b"retry-after: 1" in each for each in found if each.startswith(b"HTTP/1.1 429 "))
        assert sum(each.startswith(b"HTTP/1.1 200 ") for each in found) >= settings.connections
        assert httpx.post(f"{address}/v1/predict", json=OP).status_code == 200


def test_clients_that_leave_leave_nothing_behind(settings: ServiceSettings) -> None:
    """In the middle of their question, before and in the middle of the answer."""
    body = json.dumps(OP)
    whole = HEAD.format("application/json") + f"Content-Length: {len(body)}\r\n\r\n{body}"
    with running(settings) as address:
        for number in range(90):
            with connected(address, whole if number % 3 else whole[:-20]) as (leaving,):
                if number % 3 == 1:
                    leaving.recv(10)
                leaving.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert httpx.post(f"{address}/v1/predict", json=OP).status_code == 200
        for _ in range(100):
            if "opcast_requests_under_way 1.0" in httpx.get(f"{address}/metrics").text:
                return
            time.sleep(0.1)
    pytest.fail("calls of clients that left are still under way")


def belongings(process: int) -> dict[str, int]:
    """How many open files, threads and processes a process has."""
    place = Path("/proc") / str(process)
    children = [child for task in (place / "task").iterdir() for child in (task / "children").read_text().split()]
    files, threads = (len(list((place / name).iterdir())) for name in ("fd", "task"))
    return {"files": files, "threads": threads, "processes": len(children)}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="what a process has is looked up in /proc")
def test_two_hundred_that_leave_in_mid_answer_leave_nothing_behind(tmp_path: Path) -> None:
    """A server of its own, which sends each a table: it goes on, with no more files, threads and processes."""
    table, path = arrow_table(2_000), "predict/table?kind=gemm&device=h100_sxm"
    head = HEAD.format(ARROW).replace("predict", path) + f"Content-Length: {len(table)}\r\n\r\n"
    with own_server(tmp_path, "workers=1") as server, httpx.Client(base_url=server.address, timeout=300) as patient:
        whole = patient.post(f"/v1/{path}", content=table, headers={"Content-Type": ARROW})
        assert whole.status_code == 200  # all that stays is there from now on
        before = belongings(server.process.pid)
        for _ in range(200):
            with connected(server.address, head) as (leaving,):
                leaving.settimeout(300)
                leaving.sendall(table)
                assert leaving.recv(10) == b"HTTP/1.1 2"
                leaving.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        deadline = time.monotonic() + 300
        while "opcast_requests_under_way 1.0" not in patient.get("/metrics").text:
            assert time.monotonic() < deadline, "calls of clients that left are still under way"
            time.sleep(0.1)
        assert patient.post("/v1/predict", json=OP).status_code == 200
        after = belongings(server.process.pid)
        while any(after[name] > before[name] + 2 for name in after) and time.monotonic() < deadline:
            time.sleep(0.1)  # what is being closed takes a moment
            after = belongings(server.process.pid)
        assert all(after[name] <= before[name] + 2 for name in after), (before, after)
        assert "Traceback" not in server.said()
        assert not list((tmp_path / "tmp").iterdir())
