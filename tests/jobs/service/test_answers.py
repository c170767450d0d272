"""Over HTTP stands what Python and the command line answer."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import opcast
from opcast.datasets.devices import known_devices
from opcast.datasets.ops import KINDS, make_op
from opcast.datasets.store import Store
from opcast.harness.environment import node_name
from opcast.jobs.service.guard import ARROW
from opcast.jobs.service.tables import read_stream
from opcast.jobs.service.work import predicted
from opcast.jobs.show import BadInputError
from opcast.simulator.question.predictions import PredictRequest
from opcast.simulator.question.sources import Sources

GEMM = {"kind": "gemm", "m": 512, "n": 1024, "k": 2048, "dtype": "bf16"}
STEP = {"model": "tiny_llama_100m", "device": "h100_sxm", "seq_len": 512}


def test_one_op(client: httpx.Client, home: str) -> None:
    found = client.post("/v1/predict", json={"op": GEMM, "device": "h100_sxm"})
    assert found.status_code == 200
    usual = opcast.predict("gemm", "h100_sxm", m=512, n=1024, k=2048, dtype="bf16", home=home).to_dict()
    assert found.json() == {name: None if value != value else value for name, value in usual.items()}


def test_this_machine_is_what_the_store_says_on_every_face(tmp_path: Path) -> None:
    Store(tmp_path / "store").note_machine(node_name(), "l4")
    op, sources = make_op("gemm", m=512, n=1024, k=2048), Sources.at(str(tmp_path))
    request = PredictRequest(ops=(op,), device="local", sources=sources)
    assert predicted(request)[0].device == opcast.predict(request)[0].device == "l4"


def test_a_collective_on_links(client: httpx.Client) -> None:
    op = {"kind": "all_reduce", "size_bytes": 2**20, "ranks": 16}
    asked = {"op": op, "cluster": "dgx_h100", "nodes": 2, "network": "flow"}
    found = client.post("/v1/predict", json=asked | {"device": "h100_sxm"}).json()
    assert found["latency_us"] > 0
    assert found["network"]["topology"]


def test_many_at_once_get_each_its_own(client: httpx.Client, address: str) -> None:
    """Callers that are answered together get what each gets alone, and a bad op among them is refused alone."""
    sizes = [64 * step for step in range(1, 25)]

    def ask(m: int) -> httpx.Response:
        kind = {"kind": "gem" if m == 640 else "gemm", "m": m, "n": 512, "k": 512, "dtype": "bf16"}
        return httpx.post(f"{address}/v1/predict", json={"op": kind, "device": "b200_sxm"})

    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(ask, sizes))
    assert [each.status_code for each in found] == [400 if m == 640 else 200 for m in sizes]
    body = {"ops": [{**GEMM, "m": m, "n": 512, "k": 512} for m in sizes], "device": "b200_sxm"}
    batch = client.post("/v1/predict/batch", json=body).json()["predictions"]
    for one, same, m in zip(found, batch, sizes, strict=True):
        assert m == 640 or one.json() == same


def test_a_table(client: httpx.Client) -> None:
    sizes = np.arange(1, 2001) * 8
    table = pa.table({"m": sizes, "n": np.full(2000, 512), "k": np.full(2000, 512)})
    found = client.post("/v1/predict/table?kind=gemm&device=h100_sxm", content=stream(table), headers=KIND)
    assert found.status_code == 200
    rows = pa.ipc.open_stream(found.content).read_all()
    assert rows["m"].to_pylist() == sizes.tolist()
    alone = client.post("/v1/predict", json={"op": {**GEMM, "m": 8 * 777, "n": 512, "k": 512}, "device": "h100_sxm"})
    assert rows["latency_us"][776].as_py() == pytest.approx(alone.json()["latency_us"], rel=1e-9)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "no Arrow IPC stream"),
        (b"\xff\xff\xff\xff\x10\x00\x00\x00nonsense........", "no Arrow IPC stream"),
        ({"m": [1, 2], "n": [4, 4], "k": [4, 0]}, "row 2"),
        ({"m": [1, 2], "n": [4, 4]}, "k"),
        ({"m": pa.array([], pa.int64())}, "no rows"),
        ({"m": [1] * 3001, "n": [1] * 3001, "k": [1] * 3001}, "more than 3,000 rows"),
    ],
)
def test_what_is_no_table(serve, content, said: str) -> None:
    with serve(batch=3000) as address:
        body = content if isinstance(content, bytes) else stream(pa.table(content))
        found = httpx.post(f"{address}/v1/predict/table?kind=gemm&device=h100_sxm", content=body, headers=KIND)
    assert found.status_code == 400, found.text
    assert said in found.json()["error"]["message"]


def packed(table: pa.Table) -> bytes:
    """A table as an Arrow IPC stream that is compressed."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def test_a_packed_table(client: httpx.Client) -> None:
    """Compressed columns and dictionaries are taken, and answered as plain ones are."""
    rows = {"m": [64, 128] * 500, "n": [64] * 1000, "k": [64] * 1000}
    table = pa.table({**rows, "dtype": pa.array(["bf16", "fp16"] * 500).dictionary_encode()})
    path = "/v1/predict/table?kind=gemm&device=h100_sxm"
    found, usual = (client.post(path, content=each, headers=KIND) for each in (packed(table), stream(table)))
    assert found.status_code == 200, found.text
    both = [pa.ipc.open_stream(each.content).read_all()["latency_us"] for each in (found, usual)]
    assert both[0] == both[1]


def bombs() -> dict[str, pa.Table]:
    """Tables that are small to send and large to hold."""
    rows = pa.array(np.zeros(1_000_000, np.int32))
    text = pa.DictionaryArray.from_arrays(rows, ["x" * 100_000])
    return {
        "rows": pa.table({"m": np.zeros(20_000_000, np.int8)}),
        "bytes": pa.table(
            {"m": np.zeros(1_000_000), **{name: np.zeros(1_000_000) for name in ("n", "k", "batch", "ranks")}}
        ),
        "texts": pa.table({"dtype": text}),
        "columns": pa.table({"x": np.zeros(100_000_000, np.int8)}),
        "kinds": pa.table({"m": pa.array([[0] * 10] * 10)}),
    }


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("rows", "more than"),
        ("bytes", "once unpacked"),
        ("texts", "text of"),
        ("columns", "no op has"),
        ("kinds", "list"),
    ],
)
def test_a_table_is_not_unpacked_before_it_is_looked_at(name: str, said: str) -> None:
    """What a table takes is known before it is unpacked: the whole of what is held stays below a few MiB."""
    content = packed(bombs()[name])
    assert len(content) < 200_000
    usual = pa.default_memory_pool()
    counting = pa.proxy_memory_pool(usual)
    pa.set_memory_pool(counting)
    try:
        with pytest.raises(BadInputError, match=said):
            read_stream(content, 1_000_000, 16)
    finally:
        pa.set_memory_pool(usual)
    assert counting.max_memory() < 8 * 2**20


def test_sizes_have_units_as_everywhere(client: httpx.Client, home: str) -> None:
    """``1GiB`` as on the command line and in Python, and a group says how many ranks there are."""
    op = {"kind": "all_reduce", "size_bytes": "1GiB", "ranks": 8}
    asked = [{**op, "size_bytes": size} for size in ("1GiB", "1024 MiB", 2**30)]
    place = {"cluster": "dgx_h100", "device": "h100_sxm"}
    found = [client.post("/v1/predict", json={"op": each, **place}).json()["latency_us"] for each in asked]
    usual = opcast.predict("all_reduce", "h100_sxm", cluster="dgx_h100", size_bytes="1GiB", ranks=8, home=home)
    assert found == [usual.latency_us] * 3
    group = {"op": {"kind": "all_reduce", "size_bytes": "1GiB"}, "group": list(range(8)), **place}
    assert client.post("/v1/predict", json=group).json()["latency_us"] == usual.latency_us
    batch = client.post("/v1/predict/batch", json={"ops": asked, **place}).json()["predictions"]
    assert [each["latency_us"] for each in batch] == found
    wrong = client.post("/v1/predict", json={"op": {**op, "size_bytes": "1GiX"}, **place})
    assert (wrong.status_code, "1GiX" in wrong.text) == (400, True)


def test_a_step(client: httpx.Client, home: str) -> None:
    found = client.post("/v1/simulate", json=STEP).json()
    usual = opcast.simulate("tiny_llama_100m", device="h100_sxm", seq_len=512, home=home)
    assert math.isclose(found["step_time_s"], usual.step_time_s, rel_tol=1e-9)
    assert found["memory"]["peak_gib"] == pytest.approx(usual.memory.peak_gib)
    spelled = client.post("/v1/simulate", json={**STEP, "model": "Tiny-Llama-100M", "device": "H100-SXM5-80GB"}).json()
    assert spelled["step_time_s"] == found["step_time_s"]
    report = client.post("/v1/simulate/report", json=STEP)
    assert report.headers["content-type"].startswith("text/html")
    assert "tiny_llama_100m" in report.text


SEARCH = {"model": "tiny_llama_100m", "cluster": "dgx_h100", "global_batch": 16, "seq_len": 256}


def test_a_search(client: httpx.Client, home: str) -> None:
    """Progress that only goes forward, then the answer that Python gets."""
    space = {"tp": [1, 2], "pp": [1], "recompute": ["none"], "zero_stage": [0, 1], "micro_batch": [1]}
    told = events(client.post("/v1/search", json={**SEARCH, "space": space}).text)
    assert [kind for kind, _ in told][-1] == "answer"
    done = [each["done"] for kind, each in told if kind == "progress"]
    assert done == sorted(done)
    usual = opcast.search("tiny_llama_100m", space, cluster="dgx_h100", global_batch=16, seq_len=256, home=home)
    assert [row["step_time_s"] for row in told[-1][1]["best"]] == [row["step_time_s"] for row in usual.best]


LOAD = {"model": "tiny_llama_100m", "device": "h100_sxm", "traffic": {"rate": 50, "requests": 40}}


def test_ways_to_serve(client: httpx.Client) -> None:
    space = {"tp": [1], "batch": [8, 32], "max_tokens": [2048]}
    body = {"model": "tiny_llama_100m", "cluster": "dgx_h100", "input_len": 256, "output_len": 64, "space": space}
    told = events(client.post("/v1/search/serving", json=body).text)
    assert {kind for kind, _ in told} == {"progress", "answer"}
    assert told[-1][1]["best"][0]["rank"] == 1
    kind, said = events(client.post("/v1/search/serving", json=body | {"space": {"tp": [5]}}).text)[-1]
    assert kind == "error"
    assert "the space is empty" in said["message"]


def test_the_picture_of_a_fabric(client: httpx.Client) -> None:
    op = {"kind": "all_reduce", "size_bytes": 1 << 20, "ranks": 16}
    page = client.post("/v1/predict/report", json={"op": op, "cluster": "dgx_h100", "nodes": 2})
    assert page.headers["content-type"].startswith("text/html")
    assert "<svg" in page.text
    gemm = {"op": {"kind": "gemm", "m": 1, "n": 1, "k": 1}, "cluster": "dgx_h100"}
    assert "runs on no links" in client.post("/v1/predict/report", json=gemm).json()["error"]["message"]
    assert "needs a cluster" in client.post("/v1/predict/report", json={"op": op}).json()["error"]["message"]


def test_a_served_load(client: httpx.Client, home: str) -> None:
    found = client.post("/v1/serving", json=LOAD).json()
    usual = opcast.serving("tiny_llama_100m", "h100_sxm", traffic=LOAD["traffic"], home=home)
    assert found["completed"] == 40
    assert found["ttft_ms"] == pytest.approx(usual.ttft_ms.to_dict())
    assert found["cdf"]["ttft_ms"][-1][1] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"router": "os:system"}, "router=os:system"),
        ({"scheduler": {"policy": "os:system"}}, "scheduler.policy=os:system"),
        ({"scheduler": {"policy": "fifo"}}, "fifo"),
        ({"traffic": {"trace": "/etc/passwd"}}, "traffic.trace"),
        ({"traffic": {"requests": 10**9}}, "traffic.requests"),
        ({"traffic": {"rate": "x"}}, "rate"),
        ({"replicas": 0}, "replicas=0"),
        ({"device": None}, "device or a cluster"),
        ({"decode_pool": {"replicas": 1, "step": {"model": "a"}}}, "decode_pool.step"),
    ],
)
def test_a_load_that_cannot_be(client: httpx.Client, changed: dict, said: str) -> None:
    found = client.post("/v1/serving", json={**LOAD, **changed})
    assert found.status_code == 400, found.text
    assert said in found.json()["error"]["message"]


def test_a_search_that_cannot_be(client: httpx.Client) -> None:
    assert client.post("/v1/search", json={**SEARCH, "space": {"tp": ["x"]}}).status_code == 422
    assert client.post("/v1/search", json={**SEARCH, "model": "a/b"}).status_code == 400
    told = events(client.post("/v1/search", json={**SEARCH, "space": {"tp": [3]}}).text)
    assert told[-1][0] == "error"
    assert "tp" in told[-1][1]["message"]


def events(text: str) -> list[tuple[str, dict]]:
    """The events of a stream."""
    parts = [part.split("\n") for part in text.strip().split("\n\n")]
    return [(kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for kind, data in parts]


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/v1/predict", {"op": {**GEMM, "m": 0}}, 400, "m"),
        ("/v1/predict", {"op": GEMM, "device": "h100"}, 200, None),
        ("/v1/predict", {"op": GEMM, "device": "../../../etc/passwd"}, 400, "device=../../../etc/passwd could"),
        ("/v1/predict", {"op": GEMM, "devise": "h100_sxm"}, 422, "devise"),
        ("/v1/predict", {"op": GEMM, "power_cap_w": -3}, 400, "power_cap_w"),
        ("/v1/serving", {**LOAD, "workload": "train"}, 422, "workload"),
        ("/v1/predict", {"op": {**GEMM, "m": "4096; rm"}}, 400, "m"),
        ("/v1/predict/batch", {"ops": []}, 400, "1 to"),
        ("/v1/predict/batch", {"ops": [GEMM, {**GEMM, "dtype": "fp3"}]}, 400, "fp3"),
        ("/v1/simulate", {"model": "os:system", "device": "h100_sxm"}, 400, "not offered"),
        ("/v1/simulate", {"model": "../conf/model/llama3_8b.yaml", "device": "h100_sxm"}, 400, "not offered"),
        ("/v1/simulate", {"model": "meta-llama/Llama-9-8B", "device": "h100_sxm"}, 400, "not offered"),
        ("/v1/simulate", {"model": "llama3_8b"}, 400, "device or a cluster"),
        ("/v1/simulate", {"model": "llama3_8b", "cluster": "dgx_h100", "tp": 3}, 400, "tp"),
        (
            "/v1/simulate",
            {"model": "llama3_8b", "cluster": "dgx_h100", "passes": ["os:system"]},
            400,
            "passes=os:system could",
        ),
        (
            "/v1/simulate",
            {"model": "llama3_8b", "cluster": "dgx_h100", "topology": {"file": "/etc/x"}},
            400,
            "topology.file=/etc/x could",
        ),
        ("/v1/simulate", {"model": "llama3_8b", "cluster": "dgx_h100", "stack": "../../x"}, 400, "stack=../../x could"),
        ("/v1/simulate", {"model": "llama3_8b", "workload": "simai", "cluster": "dgx_h100"}, 400, "simai"),
        ("/v1/simulate", {"model": {"model_type": "nothing"}, "device": "h100_sxm"}, 400, "nothing"),
    ],
)
def test_bad_input_is_one_line(client: httpx.Client, path: str, body: dict, status: int, said: str | None) -> None:
    found = client.post(path, json=body)
    assert found.status_code == status, found.text
    if said is not None:
        assert set(found.json()) == {"error"}
        message = found.json()["error"]["message"]
        assert said in message
        assert "\n" not in message
        assert "Traceback" not in message


def test_what_is_known(client: httpx.Client) -> None:
    assert {row["id"] for row in client.get("/v1/devices").json()["devices"]} >= set(known_devices())
    assert [row["kind"] for row in client.get("/v1/ops").json()["ops"]] == list(KINDS)
    for name in ("clusters", "models", "predictors", "stacks", "precisions"):
        assert client.get(f"/v1/{name}").json()[name], name
    assert "/" not in str(client.get("/v1/predictors").json()["predictors"][0].get("folder", ""))
    assert client.get("/v1/passwords").status_code == 422


def test_counters(client: httpx.Client) -> None:
    before = client.get("/metrics").text
    client.post("/v1/predict", json={"op": GEMM, "device": "h100_sxm"})
    after = client.get("/metrics").text
    assert counted(after, "opcast_ops_predicted_total") == counted(before, "opcast_ops_predicted_total") + 1
    assert 'opcast_requests_total{route="/v1/predict",status="200"}' in after


def test_the_description_names_every_call(client: httpx.Client) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    assert {"/v1/predict", "/v1/predict/batch", "/v1/predict/table", "/v1/simulate", "/v1/{what}"} <= set(paths)


VALUES = st.one_of(
    st.integers(-2, 2**40),
    st.floats(),
    st.text(max_size=8),
    st.none(),
    st.booleans(),
    st.lists(st.integers(), max_size=2),
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_op_is_too_strange(address: str, data) -> None:
    """Ops with real names and any values are answered or refused; the service itself never fails."""
    kind = data.draw(st.sampled_from(sorted(KINDS)))
    dims = {name: data.draw(st.one_of(st.integers(1, 4096), VALUES)) for name in KINDS[kind].names}
    asked = {"op": {"kind": kind, "dtype": data.draw(st.sampled_from(["bf16", "fp8_e4m3", "int8", "x"])), **dims}}
    asked["device"] = data.draw(st.sampled_from(sorted(known_devices())))
    asked |= data.draw(st.dictionaries(st.sampled_from(["power_cap_w", "cache", "network", "stride", "group"]), VALUES))
    found = httpx.post(f"{address}/v1/predict", content=json.dumps(asked), headers={"Content-Type": "application/json"})
    assert found.status_code < 500, (asked, found.text)
    assert ("error" in found.json()) == (found.status_code != 200)


KIND = {"Content-Type": ARROW}


def stream(table: pa.Table) -> bytes:
    """A table as an Arrow IPC stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def counted(text: str, name: str) -> float:
    """The value of a counter."""
    return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name + " "))


def test_a_trace_that_ships_is_named_over_http(client: httpx.Client) -> None:
    law = {"base_us": 5000, "decode_us": 20, "prefill_token_us": 60}
    body = {"law": law, "kv": {"blocks": 40_000}, "traffic": {"trace": "azure_code_like", "speed": 0.2}}
    found = client.post("/v1/serving", json=body)
    assert found.status_code == 200, found.text
    assert found.json()["completed"] == 1000
