"""Whole decode steps on consumer cards: one that has no less of anything is never slower."""

from __future__ import annotations

from itertools import permutations

import pytest

import opcast
from opcast.datasets.devices import known_devices, load_device
from opcast.models.kinship import no_less

CARDS = [name for name in known_devices() if name.startswith("rtx_") and load_device(name).memory_gib > 11]


def decode_ms(card: str, stack: str, precision: str) -> float:
    """A decode step of a small model at batch 1."""
    return opcast.simulate(
        model="llama3_2_3b", workload="decode", device=card, stack=stack, precision=precision, batch=1, input_len=512
    ).tpot_ms


def test_newer_card_with_more_bandwidth_is_faster() -> None:
    assert decode_ms("rtx_4090", "vllm", "fp16") < decode_ms("rtx_3090", "vllm", "fp16")


@pytest.mark.parametrize(("stack", "precision"), [("vllm", "fp16"), ("llama_cpp", "q4_k_m")])
def test_card_that_has_no_less_of_anything_is_no_slower(stack: str, precision: str) -> None:
    times = {card: decode_ms(card, stack, precision) for card in CARDS}
    pairs = [pair for pair in permutations(CARDS, 2) if no_less(*map(load_device, pair))]
    assert ("rtx_4090", "rtx_3090") in pairs
    slower = {pair: [times[card] for card in pair] for pair in pairs if times[pair[0]] > most(*pair) * times[pair[1]]}
    assert slower == {}


def most(one: str, other: str) -> float:
    """How much slower one may be: cards of two generations are answered by tables that two labs timed."""
    return 1.01 if load_device(one).architecture == load_device(other).architecture else 1.03
