"""``opcast serving observe`` against a server in this process: times, limits, and that nothing goes elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pandas as pd
import pytest

from opcast.harness.serving_client import (
    ObservedRequest,
    SendingPlan,
    SentRequest,
    ServerAddressError,
    _send,
    endpoint_of,
)
from opcast.jobs.cli import main

FIRST_S, NEXT_S = 0.05, 0.01


@dataclass
class SmallServer:
    """A server that streams so many tokens: the first after ``FIRST_S``, the others ``NEXT_S`` apart."""

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    way: str = "stream"
    sleep_s: float = 0.0


@pytest.fixture
def server() -> Iterator[SmallServer]:
    state = SmallServer()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            with contextlib.suppress(ConnectionError):  # who asked has gone
                self.answer()

        def answer(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            state.bodies.append(body)
            state.paths.append(self.path)
            state.keys.append(self.headers.get("Authorization", ""))
            if state.way == "redirect":
                self.send_response(307)
                self.send_header("Location", f"{state.url}/elsewhere")
                self.end_headers()
                return
            if state.way == "error" and len(state.bodies) == 1:
                self.send_response(400)
                self.end_headers()
                self.wfile.write(b'{"error": "prompt too long"}')
                return
            self.send_response(200)
            self.end_headers()
            time.sleep(state.sleep_s)
            for token in range(body["max_tokens"]):
                time.sleep(FIRST_S if token == 0 else NEXT_S)
                self.event({"choices": [{"text": "x"}]} if state.way != "junk" else {"error": "out of memory"})
            if state.way == "cut":
                return
            self.event({"choices": [], "usage": {"prompt_tokens": len(body["prompt"]), "completion_tokens": token + 1}})
            self.wfile.write(b"data: [DONE]\n\n")

        def event(self, value: dict[str, Any]) -> None:
            self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")
            self.wfile.flush()

        def log_message(self, *_: Any) -> None:
            pass

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    running.daemon_threads = True
    state.url = f"http://127.0.0.1:{running.server_address[1]}"
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    yield state
    running.shutdown()
    running.server_close()
    thread.join()


def asked(server: SmallServer, tmp_path: Path, *words: str) -> int:
    given = [f"url={server.url}", "model_name=small", f"output={tmp_path / 'seen.parquet'}"]
    return main(["serving", "observe", *given, *words])


SHORT = ["traffic.requests=6", "traffic.rate=40", "traffic.input.mean=9", "traffic.output.mean=5"]


def test_times_are_those_of_the_server(
    server: SmallServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy of the environment would refuse: it is not asked."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    (tmp_path / "key").write_text("secret\n")
    assert asked(server, tmp_path, *SHORT, f"key_file={tmp_path / 'key'}", "format=json") == 0
    answer = json.loads(capsys.readouterr().out)
    rows = pd.read_parquet(tmp_path / "seen.parquet")
    assert (answer["sent"], answer["answered"], len(rows)) == (6, 6, 6)
    assert (rows.error == "").all()
    assert rows.output_tokens.tolist() == [5] * 6
    assert rows.input_tokens.tolist() == [9] * 6
    assert (rows.ttft_ms >= 1e3 * FIRST_S).all()
    # a first token that a busy machine delays comes nearer to the next one: the whole is never shorter
    assert (rows.ttft_ms + 4 * rows.tpot_ms >= 1e3 * (FIRST_S + 4 * NEXT_S) * 0.9).all()
    assert rows.itl_ms.map(len).tolist() == [4] * 6
    assert answer["ttft_ms"]["mean"] == pytest.approx(rows.ttft_ms.mean())
    assert set(server.paths) == {"/v1/completions"}
    assert set(server.keys) == {"Bearer secret"}
    assert all(body["ignore_eos"] and body["stream"] and len(body["prompt"]) == 9 for body in server.bodies)
    assert len({tuple(body["prompt"]) for body in server.bodies}) == 6


def test_what_was_seen_is_a_trace_and_is_set_beside_it_simulated(
    server: SmallServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert asked(server, tmp_path, *SHORT) == 0
    assert "6 of 6 requests were answered" in capsys.readouterr().out
    law = ["law.base_us=10000", "law.prefill_token_us=4000", "kv.blocks=2000"]
    seen = tmp_path / "seen.parquet"
    assert main(["serving", f"observed={seen}", *law, "format=json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    rows = pd.read_parquet(seen)
    assert answer["completed"] == 6
    ttft = answer["observed"]["ttft_ms"]["mean"]
    assert ttft["seen"] == pytest.approx(rows.ttft_ms.mean())
    assert ttft["off"] == pytest.approx(ttft["simulated"] / ttft["seen"] - 1)
    assert main(["serving", f"observed={seen}", *law]) == 0
    assert "seen on the server and simulated" in capsys.readouterr().out
    assert main(["serving", "sweep", f"observed={seen}", *law]) == 2


def test_prompts_share_what_the_trace_says_that_they_share(server: SmallServer, tmp_path: Path) -> None:
    path = tmp_path / "shared.jsonl"
    blocks = [[1, 2], [1, 3], [1, 2]]
    lines = [{"timestamp": 0, "input_length": 1100, "output_length": 1, "hash_ids": ids} for ids in blocks]
    path.write_text("\n".join(map(json.dumps, lines)))
    assert asked(server, tmp_path, f"traffic.trace={path}") == 0
    one, two, three = sorted((body["prompt"] for body in server.bodies), key=lambda prompt: prompt[:1024])
    prompts = [one, two, three]
    assert all(len(prompt) == 1100 and prompt[:512] == one[:512] for prompt in prompts)
    middles = sorted(tuple(prompt[512:1024]) for prompt in prompts)
    assert len(set(middles)) == 2
    assert len({tuple(prompt[1024:]) for prompt in prompts}) == 3


def test_a_run_is_bounded_in_count_and_time(
    server: SmallServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert asked(server, tmp_path, *SHORT, "most_requests=2") == 0
    assert len(server.bodies) == 2
    assert "the first 2 of 6 requests are sent" in capsys.readouterr().err
    server.sleep_s = 5.0
    began = time.perf_counter()
    assert asked(server, tmp_path, *SHORT, "seconds=0.5") == 1
    assert time.perf_counter() - began < 4.0
    rows = pd.read_parquet(tmp_path / "seen.parquet")
    assert rows.error.str.contains("within the 0.5 s of the run").all()
    assert main(["serving", f"observed={tmp_path / 'seen.parquet'}", "law.base_us=10", "kv.blocks=100"]) == 2


def test_no_redirect_is_followed_and_errors_are_told(
    server: SmallServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.way = "redirect"
    assert asked(server, tmp_path, *SHORT, "most_requests=1") == 1
    assert server.paths == ["/v1/completions"]
    assert "HTTP 307 (redirects are not followed)" in capsys.readouterr().err
    server.way = "error"
    server.bodies.clear()
    assert asked(server, tmp_path, *SHORT, "most_requests=3") == 0
    said = capsys.readouterr()
    assert "2 of 3 requests were answered" in said.out
    assert 'HTTP 400 {"error": "prompt too long"}' in said.err
    server.way = "junk"
    assert asked(server, tmp_path, *SHORT, "most_requests=1") == 1
    assert "out of memory" in capsys.readouterr().err


def test_a_stream_that_is_cut_is_no_answer(
    server: SmallServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.way = "cut"
    assert asked(server, tmp_path, *SHORT, "most_requests=2", "format=json") == 1
    answer = json.loads(capsys.readouterr().out)
    assert (answer["sent"], answer["answered"], answer["ttft_ms"]) == (2, 0, None)
    assert answer["errors"] == {"ValueError: the stream ended early": 2}


@pytest.mark.parametrize(
    "end", [b"data: [DONE]", b"data:[DONE]\n", b'data: {"choices": [{"finish_reason": "stop"}]}\n']
)
def test_ways_to_end_a_stream(end: bytes) -> None:
    body = b'data: {"choices": [{"text": "x"}]}\n\n' + end

    async def row() -> ObservedRequest:
        answer = httpx.MockTransport(lambda request: httpx.Response(200, content=body))
        row, plan = ObservedRequest(0, 0.0, 0.0, 1, 1), SendingPlan("http://h", "m", 1.0)
        async with httpx.AsyncClient(transport=answer) as client:
            await _send(client, "http://h/v1/completions", plan, SentRequest(0.0, [1], 1, 1), row)
        return row

    assert asyncio.run(row()).output_tokens == 1


@pytest.mark.parametrize(
    ("column", "values", "said"),
    [
        ("ttft_ms", ["5", "soon"], "row 2: ttft_ms=soon is no number"),
        ("itl_ms", [[1.0], None], "row 2 has no itl_ms"),
        ("itl_ms", [3.0, 4.0], "row 1: itl_ms=3.0 must be a list of numbers"),
        ("itl_ms", [["a"], ["b"]], "must be a list of numbers"),
    ],
)
def test_seen_times_that_are_none_are_one_line(
    column: str, values: list[Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "seen.parquet"
    times = {name: [5.0, 6.0] for name in ("ttft_ms", "tpot_ms", "e2e_ms")} | {"itl_ms": [[1.0], [1.0]]}
    rows = {"arrival_s": [0, 1], "input_tokens": [9, 9], "output_tokens": [2, 2], "error": ["", ""]}
    pd.DataFrame(rows | times | {column: values}).to_parquet(path)
    assert main(["serving", f"observed={path}", "law.base_us=100", "kv.blocks=100"]) == 2
    shown = capsys.readouterr().err.strip().splitlines()
    assert said in shown[-1]
    assert "unexpected" not in shown[-1]


def test_clients_in_a_loop_become_a_row_of_served_runs(
    server: SmallServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "served.csv"
    closed = ["traffic.arrival=closed", "traffic.concurrency=2", "traffic.requests=4"]
    lengths = ["traffic.input.mean=9", "traffic.output.mean=5"]
    told = {"stack": "vllm", "version": "0.18.0", "model_canon": "llama3_8b", "gpu_canon": "h100_sxm", "tp": 1}
    about = [f"about.{name}={value}" for name, value in told.items()]
    for _ in range(2):
        assert asked(server, tmp_path, *closed, *lengths, f"row={path}", *about) == 0
    rows = pd.read_csv(path)
    assert len(rows) == 2
    assert rows[
        ["concurrency", "input_len_tokens", "output_len_tokens", "lengths"]
    ].drop_duplicates().values.tolist() == [[2, 9, 5, "fixed"]]
    assert (rows.ttft_ms >= 1e3 * FIRST_S).all()
    capsys.readouterr()
    assert asked(server, tmp_path, *SHORT, f"row={path}", *about) == 2
    assert "traffic.arrival=closed" in capsys.readouterr().err
    assert asked(server, tmp_path, *closed, f"row={path}") == 2
    assert "needs about.stack" in capsys.readouterr().err


@pytest.mark.parametrize(
    "url",
    ["ftp://a", "127.0.0.1:8000", "http://", "http://me:key@host", "http://h?x=1", "http://h:99999", "file:///etc/x"],
)
def test_an_address_that_is_none_is_one_line(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serving", "observe", f"url='{url}'", "model_name=x", f"output={tmp_path / 'x.parquet'}"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "key" not in said or "a key or a query" in said
    with pytest.raises(ServerAddressError):
        endpoint_of(url)


def test_the_address_of_completions() -> None:
    for url in ("http://h:8000", "http://h:8000/", "http://h:8000/v1", "http://h:8000/v1/completions"):
        assert endpoint_of(url) == "http://h:8000/v1/completions"
    assert endpoint_of("https://h/team") == "https://h/team/v1/completions"
