"""One trace for all batches and lengths: the same graph as tracing each."""

from __future__ import annotations

from pathlib import Path

import pytest

from opcast.simulator.trace import Workload, trace
from opcast.simulator.trace.entry import trace_source
from opcast.simulator.trace.models import resolve
from opcast.simulator.trace.redimension import step_graph

FAMILIES = ("llama", "gpt2", "qwen3_moe", "mixtral", "deepseek_v3")


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("graphs")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_the_graph_of_any_shape_is_that_of_its_own_trace(family, kind, small_model, graphs):
    model = small_model(family, n_positions=256) if family == "gpt2" else small_model(family)
    for batch, length in ((1, 20), (5, 33)):
        workload = Workload(kind, batch=batch, seq_len=length, cache="static", optimizer="none", attention="fused")
        made = step_graph(model, workload, "bf16", graphs)
        own = trace(model, workload, "bf16")
        assert made.blocks == own.blocks
        assert made.tensor_bytes.tolist() == own.tensor_bytes.tolist()
        assert made.model_flops == own.model_flops


def test_one_trace_serves_many_shapes(small_model, tmp_path):
    for length in (10, 20, 30):
        workload = Workload("decode", batch=length, seq_len=length, cache="static", optimizer="none", attention="fused")
        step_graph(small_model("llama"), workload, "bf16", tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("changes", [{"cache": "dynamic"}, {"expert_load": "zipf:1.0"}])
def test_what_has_no_single_trace_is_traced_as_it_is(changes, small_model):
    workload = Workload("decode", **{"batch": 2, "seq_len": 17, "optimizer": "none", "cache": "static"} | changes)
    model = small_model("qwen3_moe")
    assert step_graph(model, workload, "bf16", None) == trace(model, workload, "bf16")


def test_sliding_windows_are_traced_as_they_are(small_model):
    workload = Workload("prefill", batch=2, seq_len=17, optimizer="none", cache="static", attention="fused")
    assert step_graph(small_model("gemma2"), workload, "bf16", None) == trace(small_model("gemma2"), workload, "bf16")


def test_compressed_tokens_are_traced_as_they_are(small_model):
    """Every 128th token is no multiple of the length, so that one trace would be of one length whatever is asked."""
    model, caches = small_model("deepseek_v4"), []
    for length in (256, 1024):
        workload = Workload("decode", seq_len=length, optimizer="none", cache="static", attention="fused")
        made = step_graph(model, workload, "bf16", None, windows=True)
        assert made == trace(model, workload, "bf16")
        caches.append(sum(tensor.size_bytes * tensor.count for tensor in made.tensors if tensor.role == "cache"))
    windows = 3 * (31 + 32) * 16 * 2  # before and after the token; not the whole prompt that they are cut from
    compressed = [(length // 4 * (16 + 16) + length // 128 * 16) * 2 for length in (256, 1024)]  # with the indexer's
    assert caches == [pytest.approx(windows + size, rel=0.25) for size in compressed]


@pytest.mark.parametrize("family", ["llama", "gpt2", "deepseek_v3"])
def test_a_preallocated_cache_needs_few_layers_traced(family, small_model):
    source = resolve(small_model(family, layers=7))
    workload = Workload("decode", batch=3, seq_len=17, cache="static", optimizer="none", attention="fused")
    made, own = (trace_source(source, workload, "bf16", every_layer) for every_layer in (False, True))
    assert made == own
