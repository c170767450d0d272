"""Graphs on disk: exact, keyed by everything they depend on, quick to read, and never in the way."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from opcast.simulator.graph import FORMAT, Graph
from opcast.simulator.trace import Workload, cache, trace
from opcast.simulator.trace.models import resolve

Config = dict[str, Any]
TRAIN = Workload("train", 2, 16)


@pytest.fixture(scope="module")
def graph(small_model: Callable[..., Config]) -> Graph:
    return trace(small_model("deepseek_v3", 6), TRAIN, "bf16")


def test_what_is_read_is_what_was_written(graph: Graph, tmp_path: Path):
    path = cache.save_graph(tmp_path, "some", graph)
    assert path == tmp_path / "some.json.gz"
    assert cache.load_graph(tmp_path, "some") == graph
    assert list(cache.load_graph(tmp_path, "some").nodes()) == list(graph.nodes())  # type: ignore[union-attr]
    assert [p.name for p in tmp_path.iterdir()] == ["some.json.gz"]


def test_the_same_graph_is_the_same_bytes(graph: Graph, tmp_path: Path):
    first = cache.save_graph(tmp_path, "one", graph).read_bytes()
    assert cache.save_graph(tmp_path, "two", graph).read_bytes() == first


def test_everything_that_matters_is_in_the_key(monkeypatch: pytest.MonkeyPatch, small_model: Callable[..., Config]):
    source = resolve(small_model("llama"))
    keys = [cache.graph_name(source, TRAIN, "bf16")]
    keys += [cache.graph_name(resolve(small_model("llama", 4)), TRAIN, "bf16"), cache.graph_name(source, TRAIN, "fp32")]
    keys += [
        cache.graph_name(source, replace(TRAIN, **{name: value}), "bf16")
        for name, value in {
            "kind": "prefill",
            "batch": 3,
            "seq_len": 17,
            "cache": "static",
            "optimizer": "none",
            "accumulate": True,
            "attention": "fused",
            "experts": "eager",
            "expert_load": "zipf:1",
            "logits": "all",
            "frozen": ".*",
            "lora_rank": 8,
            "lora_modules": "q_proj",
            "lora_groups": ("qkv",),
            "mtp_layers": 1,
            "kbit": True,
            "images": 1,
            "image_px": 256,
        }.items()
    ]
    keys.append(cache.graph_name(source, replace(TRAIN, lora_rank=8, lora_dropout=0.1), "bf16"))
    assert len(keys) == 3 + len(TRAIN.to_dict())  # a new field must be tried above, too
    for target, value in (("FORMAT", -1), ("VERSION", -1)):
        with monkeypatch.context() as patch:
            patch.setattr(cache, target, value)
            keys.append(cache.graph_name(source, TRAIN, "bf16"))
    with monkeypatch.context() as patch:
        patch.setattr(cache, "installed_version", lambda package: f"{package} of tomorrow")
        keys.append(cache.graph_name(source, TRAIN, "bf16"))
    assert len(set(keys)) == len(keys)
    assert cache.graph_name(resolve(small_model("llama")), TRAIN, "bf16") == keys[0]


def test_a_changed_module_is_another_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "changing_model.py").write_text("def make(): ...")
    before = resolve("changing_model:make").identity
    assert resolve("changing_model:make").identity == before
    (tmp_path / "changing_model.py").write_text("def make(): return 1")
    assert resolve("changing_model:make").identity != before


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:-20],
        lambda content: b"no gzip at all",
        lambda content: gzip.compress(b"{}"),
        lambda content: gzip.compress(b"[1, 2"),
        lambda content: gzip.compress(
            json.dumps(json.loads(gzip.decompress(content)) | {"format": FORMAT + 1}).encode()
        ),
        lambda content: gzip.compress(json.dumps(json.loads(gzip.decompress(content)) | {"ops": []}).encode()),
    ],
)
def test_a_damaged_file_is_traced_anew(
    damage: Callable[[bytes], bytes], tmp_path: Path, small_model: Callable[..., Config]
):
    config, workload = small_model("gpt2", 2), Workload("prefill", 1, 4)
    whole = trace(config, workload, "fp32", tmp_path)
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    path.write_bytes(damage(content))
    assert trace(config, workload, "fp32", tmp_path) == whole
    assert path.read_bytes() == content


def test_writers_do_not_disturb_each_other(graph: Graph, tmp_path: Path):
    def write_and_read(_: int) -> bool:
        cache.save_graph(tmp_path, "shared", graph)
        return cache.load_graph(tmp_path, "shared") == graph

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(write_and_read, range(12)))
    assert [p.name for p in tmp_path.iterdir()] == ["shared.json.gz"]


def test_a_graph_from_the_cache_needs_no_torch(tmp_path: Path):
    code = f"""
import sys
from opcast.simulator.trace import Workload, trace
graph = trace("tiny_llama_100m", Workload("train", 1, 64), "fp32", {str(tmp_path)!r})
print(graph.parameters, sorted({{"torch", "transformers"}} & set(sys.modules)))
"""

    def run() -> str:
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()

    assert run() == "88096512 ['torch', 'transformers']"
    assert run() == "88096512 []"


def test_a_large_model_is_read_in_no_time(tmp_path: Path):
    workload = Workload("train", 1, 4096)
    whole = trace("llama3_8b", workload, "bf16", tmp_path)
    seconds = []
    for _ in range(5):
        began = time.process_time()
        assert trace("llama3_8b", workload, "bf16", tmp_path) == whole
        seconds.append(time.process_time() - began)
    assert min(seconds) < 0.05


def test_a_model_without_identity_is_not_kept(tmp_path: Path):
    import torch

    def factory() -> tuple[torch.nn.Module, Callable[[Workload], tuple[torch.Tensor]]]:
        return torch.nn.Linear(4, 4), lambda workload: (torch.zeros(workload.batch, 4),)

    graph = trace(factory, Workload("prefill", 2), "fp32", tmp_path)
    assert [n.op.kind for n in graph.nodes() if n.op] == ["gemm"]
    assert not list(tmp_path.iterdir())
