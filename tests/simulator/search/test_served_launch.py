"""What starts a way to serve says what the point says, and engines know what they are told."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
import yaml

from opcast.datasets.clusters import load_cluster
from opcast.simulator.question.requests import SimulateRequest
from opcast.simulator.search.served.launch import launch_serving
from opcast.simulator.search.served.request import ServedSearchRequest

REQUEST = ServedSearchRequest(
    step=SimulateRequest(model="deepseek_v3", cluster=load_cluster("dgx_h200")), input_len=4000, output_len=1000
)
TOGETHER: dict[str, Any] = {
    "cluster": "dgx_h200",
    "precision": "fp8_block",
    "pools": "together",
    "policy": "vllm",
    "tp": 2,
    "pp": 1,
    "dp": 4,
    "ep": 8,
    "batch": 64,
    "max_tokens": 8192,
    "replicas": 2,
    "ratio": "",
    "prefill_replicas": 0,
    "prefill_tp": 0,
    "prefill_pp": 0,
    "prefill_dp": 0,
    "prefill_ep": 0,
}
APART = TOGETHER | {"pools": "apart", "prefill_tp": 8, "prefill_pp": 1, "prefill_dp": 1, "prefill_ep": 1}
APART |= {"prefill_replicas": 3, "ratio": "3:2"}


def commands(text: str) -> list[dict[str, str]]:
    """The servers' commands, each as its options by name; a flag's value is empty."""
    lines = [line.removesuffix(" &") for line in text.splitlines() if line[:4] in ("vllm", "pyth", "trtl")]
    found = []
    for words in map(shlex.split, lines):
        names = [at for at, word in enumerate(words) if word.startswith("--")]
        found.append({words[at]: words[at + 1] if at + 1 < len(words) and at + 1 not in names else "" for at in names})
    return found


def test_vllm_is_told_of_every_degree() -> None:
    (own,) = commands(launch_serving(REQUEST, TOGETHER, None))
    assert own["--tensor-parallel-size"] == "2"
    assert own["--data-parallel-size"] == "4"
    assert own["--enable-expert-parallel"] == ""
    assert (own["--max-num-seqs"], own["--max-num-batched-tokens"], own["--max-model-len"]) == ("64", "8192", "5000")
    prefill, decode = commands(launch_serving(REQUEST, APART, "vllm"))
    assert '"kv_role": "kv_producer"' in prefill["--kv-transfer-config"]
    assert '"kv_role": "kv_consumer"' in decode["--kv-transfer-config"]
    assert prefill["--tensor-parallel-size"] == "8"
    assert "--enable-expert-parallel" not in prefill


def test_sglang_counts_tensor_and_data_ranks_together() -> None:
    prefill, decode, router = commands(launch_serving(REQUEST, APART, "sglang"))
    assert (decode["--tp-size"], decode["--attn-dp-size"], decode["--ep-size"]) == ("8", "4", "8")
    assert decode["--max-running-requests"] == "256"
    assert (prefill["--disaggregation-mode"], decode["--disaggregation-mode"]) == ("prefill", "decode")
    assert "--pd-disaggregation" in router


def test_tensorrt_llm_is_told_in_files() -> None:
    text = launch_serving(REQUEST, APART, "trtllm")
    prefill, decode, _ = [*commands(text), {}][:3]
    assert (decode["--tp_size"], decode["--ep_size"], prefill["--tp_size"]) == ("8", "8", "8")
    files = {part.split(".yaml")[0]: part.split("<<'END'\n")[1].split("END")[0] for part in text.split("cat > ")[1:]}
    assert yaml.safe_load(files["decode"])["enable_attention_dp"] is True
    assert yaml.safe_load(files["prefill"])["enable_attention_dp"] is False
    servers = yaml.safe_load(files["servers"])
    assert (servers["context_servers"]["num_instances"], servers["generation_servers"]["num_instances"]) == (3, 2)


@pytest.mark.parametrize("row", [TOGETHER, APART], ids=["together", "apart"])
def test_a_manifest_is_one_that_kubernetes_knows(row: dict[str, Any]) -> None:
    parts = list(yaml.safe_load_all(launch_serving(REQUEST, row, "kubernetes")))
    counts = {part["metadata"]["name"]: part["spec"]["replicas"] for part in parts if part["kind"] == "Deployment"}
    usual = {"opcast-serving-prefill": 3, "opcast-serving-decode": 2, "opcast-serving-router": 1}
    assert counts == (usual if row is APART else {"opcast-serving-server": 2})
    for part in parts:
        if part["kind"] == "Deployment" and "router" not in part["metadata"]["name"]:
            limits = part["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
            assert limits["nvidia.com/gpu"] == 8
    validate = pytest.importorskip("kubernetes_validate")
    for part in parts:
        validate.validate(part, "1.31", strict=True)


@pytest.mark.parametrize(
    ("changes", "framework", "says"),
    [
        ({"dp": 8}, "kubernetes", "a server of 16 GPUs is more than a node of 8"),
        ({"ep": 4}, "vllm", "vLLM shares experts out over all tensor and data ranks"),
        ({}, "megatron-lm", "framework=megatron-lm is none that serves"),
    ],
)
def test_what_an_engine_cannot_be_told(changes: dict[str, Any], framework: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        launch_serving(REQUEST, TOGETHER | changes, framework)
