"""Who is let in, and how much: every refusal comes at once and as one object."""

from __future__ import annotations

import gzip
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from http.client import HTTPConnection

import httpx
import pytest

from opcast.jobs.service.settings import TOKEN, ServiceSettings, settings_of
from opcast.jobs.show import BadInputError

SECRET = "a-token-of-24-characters"
OP = {"op": {"kind": "gemm", "m": 64, "n": 64, "k": 64, "dtype": "bf16"}, "device": "h100_sxm"}
STEP = {"model": "tiny_llama_100m", "device": "h100_sxm", "seq_len": 256}
USUAL = {
    "home": "~/.opcast",
    "calibration": None,
    "host": "127.0.0.1",
    "port": 0,
    "token_file": None,
    "workers": 1,
    "waiting": 4,
    "connections": 8,
    "batch": 10,
    "body_mib": 1,
    "timeout_s": 5,
    "search_s": 9,
    "follow": None,
    "follow_s": 5,
    "allow": [],
    "store": "s",
    "predictors": "p",
    "graphs": "g",
}


def test_without_the_token_nothing_is_answered(serve) -> None:
    with serve(token=SECRET) as address:
        for headers in (
            {},
            {"Authorization": "Bearer x"},
            {"Authorization": f"Bearer {SECRET}x"},
            {"Authorization": SECRET[:-1]},
        ):
            found = httpx.post(f"{address}/v1/predict", json=OP, headers=headers)
            assert found.status_code == 401
            assert "token" in found.json()["error"]["message"]
            assert httpx.get(f"{address}/metrics", headers=headers).status_code == 401
            assert httpx.get(f"{address}/docs", headers=headers).status_code == 200  # what can be asked, no answers
        good = {"Authorization": f"Bearer {SECRET}"}
        assert httpx.post(f"{address}/v1/predict", json=OP, headers=good).status_code == 200
        assert httpx.get(f"{address}/health").status_code == 200
        assert SECRET not in httpx.get(f"{address}/").text


def test_another_sites_page_cannot_ask(client: httpx.Client) -> None:
    """A name that leads here (DNS rebinding) and a form of another site are refused where no token guards."""
    assert client.post("/v1/predict", json=OP, headers={"Host": "evil.example"}).status_code == 403
    form = client.post("/v1/predict", content=json.dumps(OP), headers={"Content-Type": "text/plain"})
    assert form.status_code == 415


@pytest.mark.parametrize("host", ["[", "]", "[::1", "a:b:c", "[]:80", "", "evil.example:80"])
def test_a_name_that_is_none_is_refused(address: str, host: str) -> None:
    connection = HTTPConnection(address.removeprefix("http://"), timeout=20)
    connection.putrequest("GET", "/health", skip_host=True)
    connection.putheader("Host", host)
    connection.endheaders()
    assert connection.getresponse().status == 403
    connection.close()


@pytest.mark.parametrize("packing", ["gzip", "deflate", "zstd", "br"])
def test_packed_bodies_are_not_taken(client: httpx.Client, packing: str) -> None:
    """Nothing is unpacked for who has not been let in; tables have a packing of their own."""
    content = gzip.compress(json.dumps(OP).encode() + b" " * 10_000_000)
    headers = {"Content-Type": "application/json", "Content-Encoding": packing}
    found = client.post("/v1/predict", content=content, headers=headers)
    assert (found.status_code, packing in found.json()["error"]["message"]) == (415, True)


def test_a_token_is_not_guessed(serve) -> None:
    """Wrong tokens do not keep those with the right one out, and neither is in the log."""
    with serve(token=SECRET) as address, httpx.Client(base_url=address) as client:
        for guess in range(300):
            found = client.post("/v1/predict", json=OP, headers={"Authorization": f"Bearer {SECRET[:-1]}{guess}"})
            assert found.status_code == 401
        assert client.post("/v1/predict", json=OP, headers={"Authorization": f"Bearer {SECRET}"}).status_code == 200


def test_too_much(serve) -> None:
    with serve(body_mib=1) as address:
        large = b" " * (2**20 + 1)
        headers = {"Content-Type": "application/json"}
        assert httpx.post(f"{address}/v1/predict", content=large, headers=headers).status_code == 413
        parts = httpx.post(f"{address}/v1/predict", content=(large[:4096] for _ in range(300)), headers=headers)
        assert parts.status_code == 413


def test_a_slow_body_is_let_go(serve) -> None:
    with serve(timeout_s=1) as address:
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=20) as slow:
            head = f"POST /v1/predict HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            slow.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
            assert b" 408 " in slow.recv(4096)


def test_beyond_the_limit_is_refused_not_queued(serve) -> None:
    """Of seven steps at once, one runs, one waits, and five are told to come again."""
    with serve(workers=1, waiting=1) as address:
        assert httpx.post(f"{address}/v1/simulate", json=STEP, timeout=60).status_code == 200  # the process is there
        found: list[int] = []
        body = {**STEP, "model": "llama3_8b", "cluster": "dgx_h100", "tp": 8, "seq_len": 8192}
        del body["device"]
        ask = lambda: found.append(httpx.post(f"{address}/v1/simulate", json=body, timeout=120).status_code)  # noqa: E731
        threads = [threading.Thread(target=ask) for _ in range(7)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(found)[:2] == [200, 200]
    assert found.count(429) == 5


def test_a_step_that_takes_too_long_is_ended(serve) -> None:
    with serve(workers=1, timeout_s=1) as address:
        body = {"model": "llama3_405b", "cluster": "dgx_h100", "nodes": 2048, "network": "flow", "tp": 8}
        found = httpx.post(f"{address}/v1/simulate", json=body, timeout=60)
        assert found.status_code == 504
        assert "1 s" in found.json()["error"]["message"]
        assert httpx.post(f"{address}/v1/predict", json=OP).status_code == 200


def test_nobody_waits_for_an_answer_that_is_not_wanted(serve) -> None:
    with serve(workers=1, timeout_s=300) as address:
        body = {"model": "llama3_405b", "cluster": "dgx_h100", "nodes": 2048, "network": "flow", "tp": 8}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{address}/v1/simulate", json=body, timeout=1)
        for _ in range(100):
            if httpx.get(f"{address}/health").json()["steps_under_way"] == 0:
                return
            time.sleep(0.1)
    pytest.fail("the step goes on although its caller left")


def test_a_search_ends_with_the_stream_that_nobody_reads(serve) -> None:
    body = {"model": "tiny_llama_100m", "cluster": "dgx_h100", "nodes": 64, "seq_len": 8192, "global_batch": 1024}
    with serve(workers=1, waiting=0, timeout_s=300) as address:
        with httpx.stream("POST", f"{address}/v1/search", json=body, timeout=60) as stream:
            told = stream.iter_text()  # held: without it the stream would be closed at once
            next(told)
            next(told)
            assert httpx.get(f"{address}/health").json()["steps_under_way"] == 1
            for path in ("/v1/search", "/v1/search/serving"):
                own = body if path == "/v1/search" else {"model": body["model"], "cluster": body["cluster"]}
                refused = httpx.post(f"{address}{path}", json=own, timeout=60)
                assert (refused.status_code, refused.json()["error"]["code"]) == (429, "busy")
                assert refused.headers["retry-after"] == "1"
        for _ in range(100):
            if httpx.get(f"{address}/health").json()["steps_under_way"] == 0:
                return
            time.sleep(0.1)
    pytest.fail("the search goes on although its caller left")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"host": "0.0.0.0"}, "token"),
        ({"host": "::"}, "token"),
        ({"host": "example.org"}, "token"),
        ({"port": 70000}, "port=70000"),
        ({"port": "x"}, "port='x'"),
        ({"workers": 0}, "workers=0"),
        ({"timeout_s": True}, "timeout_s=True"),
        ({"allow": "model"}, "allow='model'"),
        ({"token_file": "/nowhere/token"}, "/nowhere/token"),
    ],
)
def test_it_does_not_start_with_an_open_door(changed, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN, raising=False)
    with pytest.raises(BadInputError, match=said.replace("=", "=")):
        settings_of({**USUAL, **changed})


def test_a_token_must_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for bad in ("short", "with spaces in the middle of it", "ünïcödé-ünïcödé-ünïcödé"):
        monkeypatch.setenv(TOKEN, bad)
        with pytest.raises(BadInputError, match="at least 16 printable"):
            settings_of(USUAL)
    monkeypatch.setenv(TOKEN, SECRET)
    made = settings_of({**USUAL, "host": "0.0.0.0"})
    assert made.token == SECRET
    assert SECRET not in repr(made)
    assert ServiceSettings().loopback


def test_the_command_serves_until_it_is_told_to_stop(tmp_path) -> None:
    command = [sys.executable, "-P", "-m", "opcast.jobs.cli", "api", "port=0", "format=json"]
    environment = {**os.environ, "OPCAST_HOME": str(tmp_path)}
    environment.pop("PYTHONUNBUFFERED", None)  # who reads the address from a pipe has it while the service runs
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as server:
        assert server.stdout is not None
        text = ""
        while not text.rstrip().endswith("}"):
            line = server.stdout.readline()
            assert line, server.stderr.read() if server.stderr else ""
            text += line
        address = json.loads(text)["address"]
        for _ in range(100):
            try:
                assert httpx.get(f"{address}/health").json()["status"] == "ok"
                break
            except httpx.ConnectError:
                time.sleep(0.1)
        taken = subprocess.run(
            [*command[:-2], f"port={address.rpartition(':')[2]}"],
            capture_output=True,
            text=True,
            check=False,
            env=environment,
        )
        assert taken.returncode == 2
        assert "cannot be had" in taken.stderr
        server.send_signal(signal.SIGTERM)
        server.wait(30)
        assert server.returncode in (0, -signal.SIGTERM)
