"""Small spaces that can be searched whole in a second or two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from opcast.datasets.clusters import load_cluster
from opcast.datasets.devices import load_device
from opcast.simulator.question.plan import load_stack
from opcast.simulator.question.requests import SimulateRequest
from opcast.simulator.question.sources import Sources
from opcast.simulator.question.work import Work
from opcast.simulator.search.request import SearchRequest
from opcast.simulator.search.served.request import ServedSearchRequest, ServedSpace
from opcast.simulator.search.space import Space
from opcast.simulator.workbench import Workbench

WIDER = {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 8}


@pytest.fixture(scope="session")
def asking(
    small_model: Callable[..., dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., SearchRequest]:
    """A function: axes, memory of the device, kind of model, other settings of the search -> a request."""
    sources = Sources.at(str(tmp_path_factory.mktemp("search")))

    def make(
        axes: dict[str, Any], memory_gib: float = 80.0, kind: str = "llama", nodes: int = 1, **own: Any
    ) -> SearchRequest:
        changes = WIDER if kind == "llama" else {}
        base = SimulateRequest(
            model=small_model(kind, 6, **changes),
            work=Work(seq_len=512, global_batch=64),
            device=replace(load_device("h100_sxm"), memory_gib=memory_gib),
            cluster=replace(load_cluster("dgx_h100"), nodes=nodes),
            sources=sources,
            price_per_gpu_hour=2.0,
        )
        usual = {
            "tp": (1, 2),
            "pp": (1, 2),
            "vpp": (1,),
            "micro_batch": (1, 4),
            "recompute": ("none", "full"),
            "cp": (1,),
        }
        return SearchRequest(base=base, space=Space(**{**usual, **axes}), **own)

    return make


@pytest.fixture(scope="session")
def bench(asking: Callable[..., SearchRequest]) -> Workbench:
    """The workbench of all of them."""
    return Workbench(asking({}).base.sources)


@pytest.fixture(scope="session")
def serving(small_model: Callable[..., dict[str, Any]], bench: Workbench) -> Callable[..., ServedSearchRequest]:
    """A function: axes, kind of model, kind of node, other settings -> a request on one node of eight GPUs."""

    def make(axes: dict[str, Any], kind: str = "llama", cluster: str = "dgx_h100", **own: Any) -> ServedSearchRequest:
        step = SimulateRequest(
            model=small_model(kind, 3, **(WIDER if kind == "llama" else {})),
            cluster=load_cluster(cluster),
            stack=load_stack("vllm"),
            sources=bench.sources,
            price_per_gpu_hour=2.0 if cluster == "dgx_h100" else None,
        )
        space = ServedSpace(**{"tp": (1, 2), "batch": (8, 32), "max_tokens": (512,), **axes})
        return ServedSearchRequest(**{"step": step, "input_len": 256, "output_len": 64, "space": space, **own})

    return make
