"""What starts a way to serve says what the point says, and engines know what they are told."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from opcast.datasets.clusters import load_cluster
from opcast.simulator.question.canonical import RequestError
from opcast.simulator.question.requests import SimulateRequest
from opcast.simulator.search.launch_errors import LaunchError
from opcast.simulator.search.served.launch import FRAMEWORKS, engine_started, launch_serving, other_engine
from opcast.simulator.search.served.request import ServedSearchRequest
from opcast.simulator.search.served.servers import settings_of_servers
from opcast.simulator.serving.engine_args import read_arguments
from opcast.simulator.serving.engines import load_serving_engine

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
    "prefill_cluster": "",
    "prefill_tp": 0,
    "prefill_pp": 0,
    "prefill_dp": 0,
    "prefill_ep": 0,
}
APART = TOGETHER | {"pools": "apart", "prefill_tp": 8, "prefill_pp": 1, "prefill_dp": 1, "prefill_ep": 1}
APART |= {"prefill_replicas": 3, "ratio": "3:2"}


def commands(text: str) -> list[dict[str, str]]:
    """The servers' commands, each as its options by name; a flag's value is empty."""
    found = []
    for line in text.splitlines():
        words = [] if line.startswith("#") else shlex.split(line.removesuffix(" &"))
        while words and re.match(r"[A-Z_]+=|\$\{|\[$|\]$|&&$|=$|0$|\d*$", words[0]):
            words = words[1:]
        if not words or words[0] not in ("vllm", "python", "trtllm-serve"):
            continue
        names = [at for at, word in enumerate(words) if word.startswith("--")]
        found.append({words[at]: words[at + 1] if at + 1 < len(words) and at + 1 not in names else "" for at in names})
    return found


def test_vllm_is_told_of_every_degree() -> None:
    own, other = commands(launch_serving(REQUEST, TOGETHER, None))
    assert (own["--port"], other["--port"]) == ("8000", "8001")
    assert own["--tensor-parallel-size"] == "2"
    assert own["--data-parallel-size"] == "4"
    assert own["--enable-expert-parallel"] == ""
    assert (own["--max-num-seqs"], own["--max-num-batched-tokens"], own["--max-model-len"]) == ("64", "8192", "5632")
    servers = commands(launch_serving(REQUEST, APART, "vllm"))
    prefill, decode = servers[0], servers[-1]
    assert len(servers) == 5
    assert '"kv_role": "kv_producer"' in prefill["--kv-transfer-config"]
    assert '"kv_role": "kv_consumer"' in decode["--kv-transfer-config"]
    assert prefill["--tensor-parallel-size"] == "8"
    assert "--enable-expert-parallel" not in prefill


def test_sglang_counts_tensor_and_data_ranks_together() -> None:
    prefill, *_, decode, router = commands(launch_serving(REQUEST, APART, "sglang"))
    assert (decode["--tp-size"], decode["--attn-dp-size"], decode["--ep-size"]) == ("8", "4", "8")
    assert decode["--max-running-requests"] == "256"
    assert (prefill["--disaggregation-mode"], decode["--disaggregation-mode"]) == ("prefill", "decode")
    assert "--pd-disaggregation" in router


def test_tensorrt_llm_is_told_in_files() -> None:
    text = launch_serving(REQUEST, APART, "trtllm")
    prefill, *_, decode, _router = commands(text)
    assert (decode["--tp_size"], decode["--ep_size"], prefill["--tp_size"]) == ("8", "8", "8")
    files = {part.split(".yaml")[0]: part.split("<<'END'\n")[1].split("END")[0] for part in text.split("cat > ")[1:]}
    assert yaml.safe_load(files["decode"])["enable_attention_dp"] is True
    assert yaml.safe_load(files["prefill"])["enable_attention_dp"] is False
    servers = yaml.safe_load(files["servers"])
    assert (servers["context_servers"]["num_instances"], servers["generation_servers"]["num_instances"]) == (3, 2)


@pytest.mark.parametrize("row", [TOGETHER, APART], ids=["together", "apart"])
@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_a_manifest_is_one_that_kubernetes_knows(engine: str, row: dict[str, Any]) -> None:
    point = row | {"policy": engine}
    if engine == "vllm" and row is APART:
        with pytest.raises(LaunchError, match="take framework=llm-d or framework=dynamo-kubernetes"):
            launch_serving(REQUEST, point, "kubernetes")
        return
    parts = list(yaml.safe_load_all(launch_serving(REQUEST, point, "kubernetes")))
    kinds = ("Deployment", "StatefulSet")
    counts = {part["metadata"]["name"]: part["spec"]["replicas"] for part in parts if part["kind"] in kinds}
    usual = {"opcast-serving-prefill": 3, "opcast-serving-decode": 2, "opcast-serving-router": 1}
    assert counts == (usual if row is APART else {"opcast-serving-server": 2})
    for part in parts:
        if part["kind"] in kinds and "router" not in part["metadata"]["name"]:
            container = part["spec"]["template"]["spec"]["containers"][0]
            assert container["name"] == engine
            assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
            read_arguments(load_serving_engine(engine), own_words(container["command"], parts))
    validate = pytest.importorskip("kubernetes_validate")
    for part in parts:
        validate.validate(part, "1.31", strict=True)


def own_words(command: list[str], parts: list[dict[str, Any]]) -> str:
    """A pod's command without the file that it reads, which must be in the manifest."""
    words = list(command)
    if "--extra_llm_api_options" in words:
        at = words.index("--extra_llm_api_options")
        folder, _, name = words[at + 1].rpartition("/")
        (files,) = (part["data"] for part in parts if part["kind"] == "ConfigMap")
        assert folder == "/etc/opcast"
        assert "enable_attention_dp" in yaml.safe_load(files[name])
        del words[at : at + 2]
    return shlex.join(words)


def test_tensorrt_llm_s_front_knows_every_pod_by_name() -> None:
    parts = list(yaml.safe_load_all(launch_serving(REQUEST, APART | {"policy": "trtllm"}, "kubernetes")))
    (files,) = (part["data"] for part in parts if part["kind"] == "ConfigMap")
    servers = yaml.safe_load(files["servers.yaml"])
    assert servers["port"] == 8000
    urls = [*servers["context_servers"]["urls"], *servers["generation_servers"]["urls"]]
    sets = {part["metadata"]["name"]: part["spec"] for part in parts if part["kind"] == "StatefulSet"}
    pods = {f"{name}-{at}.{spec['serviceName']}:8000" for name, spec in sets.items() for at in range(spec["replicas"])}
    assert set(urls) == pods
    headless = {part["metadata"]["name"] for part in parts if part.get("spec", {}).get("clusterIP") == "None"}
    assert headless == set(sets)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_dynamo_s_operator_gets_a_graph(engine: str) -> None:
    text = launch_serving(SMALL, POOLS | {"policy": engine}, "dynamo-kubernetes")
    spec = yaml.safe_load(text)["spec"]
    assert spec["backendFramework"] == engine
    workers = {name: each for name, each in spec["services"].items() if each["componentType"] == "worker"}
    assert {name: (each["replicas"], each["resources"]["limits"]["gpu"]) for name, each in workers.items()} == {
        "prefill": (2, "1"),
        "decode": (3, "2"),
    }
    for name, each in workers.items():
        assert each["subComponentType"] == name
        words = each["extraPodSpec"]["mainContainer"]["args"]
        assert words[words.index("--disaggregation-mode") + 1] == name
        assert f"dynamo.{engine}" in words
        assert "--port" not in words


@pytest.mark.parametrize(
    ("changes", "framework", "says"),
    [
        ({"dp": 8, "ep": 16}, "kubernetes", "a server of 16 GPUs is more than a node of 8"),
        ({"ep": 4}, "vllm", "vLLM shares experts out over all tensor and data ranks"),
        ({}, "megatron-lm", "framework=megatron-lm is none that serves"),
    ],
)
def test_what_an_engine_cannot_be_told(changes: dict[str, Any], framework: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        launch_serving(REQUEST, TOGETHER | changes, framework)


SMALL = ServedSearchRequest(
    step=SimulateRequest(model="llama3_8b", cluster=load_cluster("dgx_h100")), input_len=1000, output_len=200
)
POOL = TOGETHER | {"cluster": "dgx_h100", "precision": "", "tp": 2, "dp": 1, "ep": 1, "replicas": 4}
POOLS = POOL | {"pools": "apart", "replicas": 3, "prefill_tp": 1, "prefill_pp": 1, "prefill_dp": 1, "prefill_ep": 1}
POOLS |= {"prefill_replicas": 2}


@pytest.mark.parametrize("framework", ["vllm", "sglang", "trtllm", "dynamo"])
@pytest.mark.parametrize("row", [POOL, POOLS], ids=["together", "apart"])
def test_copies_have_gpus_and_ports_of_their_own(framework: str, row: dict[str, Any]) -> None:
    text = launch_serving(SMALL, row, framework)
    devices = [gpus for found in re.findall(r"CUDA_VISIBLE_DEVICES=([\d,]+)", text) for gpus in found.split(",")]
    assert sorted(devices) == [str(gpu) for gpu in range(8)]
    marks = re.findall(r"DYN_SYSTEM_PORT=(\d+)" if framework == "dynamo" else r"--port (\d+) &", text)
    assert len(marks) == len(set(marks)) >= row["replicas"] + row["prefill_replicas"] * (row is POOLS)
    sides = re.findall(r"SIDE_CHANNEL_PORT=(\d+)|bootstrap-port (\d+)", text)
    assert len(sides) == len(set(sides))
    assert "336 of room" in text
    assert subprocess.run(["sh", "-n"], input=text, text=True, check=False).returncode == 0


def test_servers_of_several_nodes_are_started_by_node() -> None:
    text = launch_serving(REQUEST, APART, "sglang")
    assert re.findall(r"^(\d+)\)$", text, re.M) == ["0", "1", "2", "3", "4"]
    assert "http://NODE_4:8201" in text
    assert '[ "${NODE_RANK:-0}" = 0 ] && python -m sglang_router.launch_router' in text
    assert subprocess.run(["sh", "-n"], input=text, text=True, check=False).returncode == 0


def test_a_request_never_is_longer_than_the_model_takes() -> None:
    long = replace(SMALL, input_len=8000, output_len=150)
    own, *_ = commands(launch_serving(long, POOL, "vllm"))
    assert own["--max-model-len"] == "8192"


@pytest.mark.parametrize("framework", ["vllm", "sglang", "trtllm"])
@pytest.mark.parametrize("row", [POOL, POOLS], ids=["together", "apart"])
def test_every_argument_is_one_that_the_engine_of_that_version_has(framework: str, row: dict[str, Any]) -> None:
    engine = load_serving_engine(framework)
    assert engine.version
    lines = [line for line in launch_serving(SMALL, row, framework).splitlines() if line.startswith("CUDA_")]
    for line in lines:
        text = re.sub(r"--extra_llm_api_options \S+", "", line.partition(" ")[2].removesuffix(" &"))
        read = read_arguments(engine, text)
        assert read.parallel.get("tp", 1) in (1, 2)


def test_llm_d_gets_values_of_its_chart() -> None:
    values = yaml.safe_load(launch_serving(SMALL, POOLS, "llm-d"))
    assert (values["prefill"]["replicas"], values["decode"]["replicas"]) == (2, 3)
    (container,) = values["decode"]["containers"]
    assert container["command"] == ["vllm", "serve"]
    assert container["args"][:3] == ["meta-llama/Meta-Llama-3-8B", "--tensor-parallel-size", "2"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert yaml.safe_load(launch_serving(SMALL, POOL, "llm-d"))["prefill"] == {"create": False}


def test_dynamo_has_a_frontend_and_workers_with_roles() -> None:
    text = launch_serving(SMALL, POOLS, "dynamo")
    assert text.count("--disaggregation-mode prefill") == 2
    assert text.count("--disaggregation-mode decode") == 3
    assert "python -m dynamo.frontend" in text
    assert "--port" not in text.replace("--http-port", "")
    with_trtllm = launch_serving(SMALL, POOLS | {"policy": "trtllm"}, "dynamo")
    assert with_trtllm.count('--override-engine-args \'{"cache_transceiver_config"') == 5
    assert "cat >" not in with_trtllm


@pytest.mark.parametrize("row", [POOL, POOLS], ids=["together", "apart"])
@pytest.mark.parametrize(
    ("framework", "engine"),
    [
        ("vllm", "vllm"),
        ("sglang", "sglang"),
        ("trtllm", "trtllm"),
        ("dynamo", "vllm"),
        ("dynamo", "trtllm"),
        ("llm-d", "vllm"),
        ("kubernetes", "sglang"),
        ("kubernetes", "trtllm"),
        ("dynamo-kubernetes", "trtllm"),
    ],
)
def test_servers_are_read_back_as_they_were_written(
    framework: str, engine: str, row: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "start"
    file.write_text(launch_serving(SMALL, row | {"policy": engine}, framework))
    settings = settings_of_servers(file)
    assert (settings["engine"], settings["model"]) == (engine, "llama3_8b")
    read = read_arguments(load_serving_engine(engine), settings["args"])
    assert not read.not_simulated
    assert read.limits["max_model_len"] == 1536
    if row is POOL:
        assert (settings["replicas"], read.parallel["tp"], read.limits["max_seqs"]) == (4, 2, 64)
        return
    assert (settings["replicas"], read.parallel["tp"]) == (2, 1)
    assert settings["decode_pool.replicas"] == 3
    assert settings["decode_pool.parallel"]["tp"] == 2
    assert settings["decode_pool.max_seqs"] == 64


def test_a_framework_says_which_engine_it_starts() -> None:
    assert [engine_started(each) for each in FRAMEWORKS] == ["vllm", "sglang", "trtllm", "", "vllm", "", ""]
    assert engine_started("dynamo", "sglang") == "sglang"
    assert (
        other_engine("sglang", "sglang") == other_engine(None, "trtllm") == other_engine("kubernetes", "trtllm") == ""
    )
    assert "policy=vllm was searched, and framework=sglang starts sglang" in other_engine("sglang", "vllm")
    with pytest.raises(RequestError, match="framework=sgland is none that serves; did you mean sglang"):
        engine_started("sgland")


MINE = """#!/bin/bash
# two copies
CUDA_VISIBLE_DEVICES=0,1 vllm serve meta-llama/Meta-Llama-3-8B --tensor-parallel-size 2 \\
  --speculative-config '{"method": "ngram", "num_speculative_tokens": 3}' --port 8000 &
CUDA_VISIBLE_DEVICES=2,3 python -m vllm.entrypoints.openai.api_server --model meta-llama/Meta-Llama-3-8B \\
  --tensor-parallel-size=2 --speculative-config '{"method": "ngram", "num_speculative_tokens": 3}' --port 8001
wait
"""


def test_a_script_of_one_s_own_is_read(tmp_path: Path) -> None:
    file = tmp_path / "start.sh"
    file.write_text(MINE.replace("-size=2", "-size 2"))
    settings = settings_of_servers(file)
    assert (settings["engine"], settings["model"], settings["replicas"]) == ("vllm", "llama3_8b", 2)
    assert read_arguments(load_serving_engine("vllm"), settings["args"]).speculation == 3
    file.write_text(MINE.replace("-size=2", "-size 4"))
    with pytest.raises(LaunchError, match="starts servers that differ"):
        settings_of_servers(file)
    file.write_text("#!/bin/sh\necho nothing\n")
    with pytest.raises(LaunchError, match="starts no server that opcast knows: vllm serve"):
        settings_of_servers(file)


def test_files_that_are_no_text_or_yaml_are_one_line(tmp_path: Path) -> None:
    file = tmp_path / "start"
    for held in (b"\xff\xfe", b"a: [", b"trtllm-serve x --extra_llm_api_options nowhere.yaml", b"kind: ConfigMap\n"):
        file.write_bytes(held)
        with pytest.raises(LaunchError, match=r"launch="):
            settings_of_servers(file)


def test_an_image_that_starts_a_server_by_itself_is_read(tmp_path: Path) -> None:
    container = {
        "name": "server",
        "image": "vllm/vllm-openai:v0.11.0",
        "args": ["--model", "meta-llama/Meta-Llama-3-8B"],
    }
    file = tmp_path / "deployment.yaml"
    file.write_text(
        json.dumps({"kind": "Deployment", "spec": {"replicas": 2, "template": {"containers": [container]}}})
    )
    settings = settings_of_servers(file)
    assert (settings["engine"], settings["model"], settings["replicas"]) == ("vllm", "llama3_8b", 2)
