"""Published iterations of RL beside what ``opcast posttrain`` says of them: ``python tests/evidence/post_training.py``.

Figures are single ones of NeMo-RL's performance summary (v0.4, on-policy and one step off, DGX H100, bf16), at
https://github.com/NVIDIA-NeMo/RL/blob/main/docs/about/performance-summary.md; settings are those of its recipes
(``examples/configs/recipes/llm/performance``). Lengths: the mean response is published, the mean prompt follows from
tokens/s; how far lengths are spread is not published, so the usual spread of ``response_len`` is taken.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import opcast

GPUS_PER_NODE, SAMPLES, CUT = 8, 2048, 4096
SPREAD = 0.75  # standard deviation over mean, as opcast has it unless told
RECIPE: dict[str, Any] = {"cluster": "dgx_h100", "method": "grpo", "prompts": 64, "responses": 32, "kl": 0.01}
ONE_STEP_OFF = {"placement": "apart", "asynchronous": True}


@dataclass(frozen=True)
class PublishedIteration:
    """A row: seconds of a step, tokens/s of a GPU, tokens of a response in the mean, and how it ran."""

    step_s: float
    tokens_per_s: float
    response: float
    nodes: int
    settings: Mapping[str, Any]

    @property
    def prompt(self) -> float:
        """Tokens of a prompt in the mean."""
        return self.tokens_per_s * self.step_s * self.nodes * GPUS_PER_NODE / SAMPLES - self.response


LLAMA: dict[str, Any] = {"model": "llama3_1_8b", "pp": 2, "zero_stage": 1, "recompute": "full"}
DENSE: dict[str, Any] = {"model": "qwen3_32b", "tp": 4, "pp": 4, "sequence_parallel": True, "zero_stage": 1}
SPARSE: dict[str, Any] = {"model": "qwen3_30b_a3b", "ep": 8, "zero_stage": 1}
ROWS = {
    "Llama 3.1 8B, on policy": PublishedIteration(97.7, 1562, 1060, 2, LLAMA | {"rollout": {"kv_fraction": 0.6}}),
    "Llama 3.1 8B, one step off": PublishedIteration(
        74.6, 2161, 1129, 2, LLAMA | ONE_STEP_OFF | {"rollout": {"gpus": 8, "kv_fraction": 0.8}}
    ),
    "Qwen3 32B, on policy": PublishedIteration(393, 540, 3206, 4, DENSE | {"rollout": {"tp": 4, "kv_fraction": 0.6}}),
    "Qwen3 32B, one step off": PublishedIteration(
        215, 494, 3207, 8, DENSE | ONE_STEP_OFF | {"rollout": {"tp": 4, "gpus": 32, "kv_fraction": 0.8}}
    ),
    "Qwen3 30B A3B, on policy": PublishedIteration(
        225, 925, 3154, 4, SPARSE | {"tp": 2, "sequence_parallel": True, "rollout": {"tp": 4, "kv_fraction": 0.6}}
    ),
}


def uncut_mean(mean: float, most: float) -> float:
    """The mean of lengths that are ``mean`` once they are cut at ``most``."""
    variance = np.log1p(SPREAD**2)
    drawn = np.exp(np.random.default_rng(0).normal(-variance / 2, np.sqrt(variance), 200_000))
    low, high = mean, 100.0 * mean
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(middle * drawn, most).mean() < mean else (low, middle)
    return float(low)


def answer(row: PublishedIteration) -> Any:
    """What opcast says of a row."""
    mean = uncut_mean(row.response, CUT - row.prompt)
    lengths = {"prompt_len": {"mean": round(row.prompt)}, "response_len": {"mean": mean, "std": SPREAD * mean}}
    settings = {"seq_len": CUT, "global_batch": 512, "nodes": row.nodes, **RECIPE, **lengths, **row.settings}
    return opcast.posttrain(**settings)


def lines(names: list[str]) -> Iterator[str]:
    """The table as Markdown."""
    yield "| run | published, s | P50, s | P10 to P90 | error | rollout | log-probs and training |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for name in names or list(ROWS):
        row, report = ROWS[name], answer(ROWS[name])
        spread, rollout_s = report.iteration_s, report.phase_s("rollout")
        trained_s = sum(phase.seconds for phase in report.phases if phase.name not in ("rollout", "weight sync"))
        error = 100.0 * (spread.p50 / row.step_s - 1.0)
        yield (
            f"| {name} | {row.step_s:g} | {spread.p50:.1f} | {spread.p10:.1f} to {spread.p90:.1f} | {error:+.1f} % "
            f"| {rollout_s:.1f} s | {trained_s:.1f} s |"
        )


if __name__ == "__main__":
    for line in lines(sys.argv[1:]):
        print(line, flush=True)
