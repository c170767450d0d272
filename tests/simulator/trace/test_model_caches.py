"""A cache is found under every name that a release of transformers has for it."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from opcast.simulator.trace.accelerated import _mpt
from opcast.simulator.trace.model_caches import CACHE_NAMES, cache_name, cached_tensors, drop_prompt, returned_cache


class Newest(nn.Module):
    def forward(self, input_ids: Any, cache: Any = None, past_key_values: Any = None) -> Any: ...


class Before(nn.Module):
    def forward(self, input_ids: Any, past_key_values: Any = None, **rest: Any) -> Any: ...


class States(nn.Module):
    def forward(self, input_ids: Any, cache_params: Any = None) -> Any: ...


class Without(nn.Module):
    def forward(self, input_ids: Any, **rest: Any) -> Any: ...


@pytest.mark.parametrize(
    ("model", "name"), [(Newest, "cache"), (Before, "past_key_values"), (States, "cache_params"), (Without, "")]
)
def test_a_model_is_given_its_cache_under_its_own_name(model: type[nn.Module], name: str) -> None:
    assert cache_name(model()) == name


@pytest.mark.parametrize("name", CACHE_NAMES)
def test_a_cache_is_found_in_outputs_and_arguments(name: str) -> None:
    held = [1]
    assert returned_cache({"logits": 0, name: held}) is held
    assert returned_cache(SimpleNamespace(loss=0, **{name: held})) is held
    assert returned_cache({name: None, "hidden_states": held}) is None
    assert returned_cache((held,)) is None


def test_what_a_window_was_cut_from_is_not_kept() -> None:
    prompt = torch.arange(100.0)
    window, whole, state = prompt[-8:], torch.ones(5), prompt[-2:]
    layer = SimpleNamespace(keys=window, values=window, whole=whole, states={"buffer": state}, length=100)
    cache = SimpleNamespace(layers=[layer])
    drop_prompt(cache)
    assert layer.keys is layer.values
    assert layer.whole is whole
    assert [tensor.untyped_storage().nbytes() for tensor in cached_tensors(cache)] == [32, 32, 20, 8]
    assert torch.equal(layer.keys, window)
    assert torch.equal(layer.states["buffer"], state)


@pytest.mark.parametrize("name", CACHE_NAMES)
def test_attention_that_is_replaced_reads_the_cache_that_it_is_given(name: str) -> None:
    before = torch.ones(1, 2, 5, 4)
    reads: list[int] = []

    class Cache:
        def update(self, key: torch.Tensor, value: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
            reads.append(layer)
            return torch.cat([before, key], 2), torch.cat([before, value], 2)

    part = SimpleNamespace(Wqkv=nn.Linear(8, 24), n_heads=2, head_dim=4, out_proj=nn.Linear(8, 8), layer_idx=3)
    alone, _ = _mpt(part, torch.ones(1, 1, 8))
    after, _ = _mpt(part, torch.ones(1, 1, 8), None, **{name: Cache()})
    assert reads == [3]
    assert not torch.allclose(alone, after)


def test_one_module_knows_the_names(root: Path) -> None:
    """Elsewhere they would be forgotten at the next renaming."""
    old = re.compile(r"\b(past_key_values|cache_params)\b")
    paths = [path for folder in ("harness", "simulator", "jobs") for path in (root / folder).rglob("*.py")]
    assert {path.name for path in paths if old.search(path.read_text())} == {"model_caches.py"}
