"""No address and no question of it leads to a file of the server. What bodies may name: :mod:`.test_naming`."""

from __future__ import annotations

from collections.abc import Mapping
from http.client import HTTPConnection
from typing import Any
from urllib.parse import quote, urlsplit

import httpx
import pytest

EVIL = "../../../../../../../etc/passwd"
SECRET = "root:x:0"
OP: dict[str, Any] = {"op": {"kind": "gemm", "m": 64, "n": 64, "k": 64}, "device": "h100_sxm"}
SEARCHED = {"model": "tiny_llama_100m", "cluster": "dgx_h100"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/predict": OP,
    "/v1/predict/report": {"op": {"kind": "all_reduce", "size_bytes": 1024, "ranks": 8}, "cluster": "dgx_h100"},
    "/v1/predict/batch": {"ops": [OP["op"]], "device": "h100_sxm"},
    "/v1/simulate": {"model": "tiny_llama_100m", "device": "h100_sxm", "seq_len": 64},
    "/v1/simulate/report": {"model": "tiny_llama_100m", "device": "h100_sxm", "seq_len": 64},
    "/v1/plan": {**SEARCHED, "global_batch": 8, "steps": 100, "step_time_s": 0.1, "checkpoint": {"size_gb": 1.0}},
    "/v1/plan/report": {**SEARCHED, "global_batch": 8, "steps": 100, "step_time_s": 0.1},
    "/v1/compare/chips": {**SEARCHED, "global_batch": 8, "seq_len": 64, "others": ["dgx_h200"]},
    "/v1/upgrade": {"model": "tiny_llama_100m", "device": "h100_sxm", "seq_len": 64, "changes": ["cublas"]},
    "/v1/posttrain": {**SEARCHED, "method": "sft", "prompts": 8, "seq_len": 64, "lives": 10},
    "/v1/posttrain/report": {**SEARCHED, "method": "sft", "prompts": 8, "seq_len": 64, "lives": 10},
    "/v1/serving": {"model": "tiny_llama_100m", "device": "h100_sxm", "traffic": {"requests": 2}},
    "/v1/serving/capacity": {"model": "tiny_llama_100m", "device": "h100_sxm", "traffic": {"requests": 2}},
    "/v1/serving/caps": {
        "model": "tiny_llama_100m",
        "device": "h100_sxm",
        "traffic": {"requests": 2},
        "power_caps_w": [400.0],
    },
    "/v1/serving/sweep": {"model": "tiny_llama_100m", "device": "h100_sxm", "traffic": {"requests": 2}, "rates": [1.0]},
    "/v1/serving/compare": {
        "model": "tiny_llama_100m",
        "device": "h100_sxm",
        "traffic": {"requests": 2},
        "replicas": 2,
    },
    "/v1/search": {**SEARCHED, "global_batch": 8, "space": {"tp": [1], "pp": [1], "micro_batch": [1]}},
    "/v1/search/serving": {**SEARCHED, "space": {"tp": [1], "batch": [8]}},
    "/v1/sweep": {
        "verb": "plan",
        **SEARCHED,
        "global_batch": 8,
        "steps": 100,
        "step_time_s": 0.1,
        "checkpoint": {"size_gb": 1.0},
        "axes": {"nodes": [1, 2]},
    },
}


def within(usual: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    """A body with one place changed."""
    made = dict(usual)
    for name, value in changed.items():
        old = made.get(name)
        made[name] = within(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return made


@pytest.fixture(scope="module")
def described(address: str) -> dict[str, Any]:
    """The service's own description."""
    found: dict[str, Any] = httpx.get(f"{address}/openapi.json").json()
    return found


def test_every_call_has_a_body_here(described: dict[str, Any]) -> None:
    assert set(BODIES) == {path for path, calls in described["paths"].items() if "post" in calls} - {
        "/v1/predict/table"
    }


def test_neither_the_address_nor_a_question_leads_out(address: str) -> None:
    place = urlsplit(address)
    paths = [f"/{EVIL}", f"/v1/{EVIL}", f"/static/{EVIL}", f"/v1/{quote(EVIL, safe='')}", "/%2e%2e/%2e%2e/etc/passwd"]
    names = ("device", "kind", "cache", "backend")
    paths += [f"/v1/predict/table?{name}={quote(EVIL, safe='')}" for name in names]
    for path in paths:
        connection = HTTPConnection(place.hostname or "", place.port, timeout=120)
        connection.request("POST" if "table" in path else "GET", path, b"", {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert 400 <= answer.status < 500, path
        assert SECRET.encode() not in answer.read()
        connection.close()
