"""Predictions a second over HTTP, their latency, and rows a second in tables; beside an empty call of the server.

    python tests/benchmarks/service.py [--seconds 5] [--callers 8] [--rows 1000000]

The server is a process of its own; callers are threads of one process with kept connections, so that both share the
machine. ``/health`` is the same path through the server without a question: what is left of its rate is opcast's part.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection

import numpy as np
import pyarrow as pa

ARROW = "application/vnd.apache.arrow.stream"


def calls(port: int, seconds: float, first: int, path: str) -> list[float]:
    """Seconds of each call of one caller."""
    connection, taken, at = HTTPConnection("127.0.0.1", port), [], first
    end = time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        if path == "/health":
            connection.request("GET", path)
        else:
            at += 1
            op = {"kind": "gemm", "m": 64 + at % 8000, "n": 64 + (at * 37) % 8000, "k": 4096, "dtype": "bf16"}
            body = json.dumps({"op": op, "device": "h100_sxm"})
            connection.request("POST", path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 200, answer.status
        taken.append(time.perf_counter() - began)
    return taken


def rate(port: int, options: argparse.Namespace, path: str) -> float:
    """Print and return the calls a second of all callers."""
    with ThreadPoolExecutor(options.callers) as pool:
        asked = [pool.submit(calls, port, options.seconds, 100_000 * n, path) for n in range(options.callers)]
        taken = np.array([each for future in asked for each in future.result()])
    found = len(taken) / options.seconds
    p50, p99 = np.percentile(taken, [50, 99]) * 1e3
    print(f"{path}: {found:,.0f} a second by {options.callers} callers, p50 {p50:.1f} ms, p99 {p99:.1f} ms")
    return float(found)


def table(port: int, rows: int) -> None:
    """Print how long tables of so many products take."""
    random = np.random.default_rng(0)
    sizes = {name: random.integers(64, 8192, rows) for name in "mnk"}
    made, sink = pa.table(sizes), pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, made.schema) as writer:
        writer.write_table(made)
    body = sink.getvalue().to_pybytes()
    for turn in ("first", "again"):
        connection = HTTPConnection("127.0.0.1", port, timeout=600)
        began = time.perf_counter()
        connection.request("POST", "/v1/predict/table?kind=gemm&device=h100_sxm", body, {"Content-Type": ARROW})
        answer = connection.getresponse()
        size = len(answer.read())
        seconds = time.perf_counter() - began
        said = f"{seconds:.2f} s, {rows / seconds:,.0f} a second, {size / 2**20:.0f} MiB"
        print(f"table of {rows:,} products, {turn}: {said}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--callers", type=int, default=8)
    parser.add_argument("--rows", type=int, default=1_000_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        command = [sys.executable, "-P", "-m", "opcast.jobs.cli", "api", "port=0", "format=json", f"home={home}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
            assert server.stdout is not None
            text = ""
            while not text.rstrip().endswith("}"):
                text += server.stdout.readline()
            port = int(json.loads(text)["address"].rpartition(":")[2])
            try:
                calls(port, 1.0, 0, "/v1/predict")  # loads the predictor
                empty = rate(port, options, "/health")
                asked = rate(port, options, "/v1/predict")
                print(f"a prediction costs {empty / asked:.2f} times an empty call")
                table(port, options.rows)
            finally:
                server.terminate()


if __name__ == "__main__":
    main()
