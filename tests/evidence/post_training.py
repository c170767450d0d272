"""Published iterations of RL beside what ``opcast posttrain`` says of them: ``python tests/evidence/post_training.py``.

Figures are single ones of NeMo-RL's performance summary (v0.4, on-policy and one step off, DGX H100, bf16), at
https://github.com/NVIDIA-NeMo/RL/blob/main/docs/about/performance-summary.md; settings are those of its recipes
(``examples/configs/recipes/llm/performance``). Lengths: the mean response is published, the mean prompt follows from
tokens/s; how far lengths are spread is not published, so the usual spread of ``response_len`` is taken.

Mechanisms were sought on :data:`ROWS` first, and on the others (:data:`LATER`) too since: no row is unseen.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import opcast

GPUS_PER_NODE, SAMPLES, CUT = 8, 2048, 4096
MOVING = ("weight sync", "training state to GPUs", "training state to host")
SPREAD = 0.75  # standard deviation over mean, as opcast has it unless told
# examples/configs/grpo_math_1B.yaml, from which all recipes inherit: sequence_packing with
# modified_first_fit_decreasing, logprob_batch_size 4; vLLM was older than 0.14 (NVIDIA-NeMo/RL issue 1539)
RECIPE: dict[str, Any] = {
    "cluster": "dgx_h100",
    "stack": "nemo_rl",
    "method": "grpo",
    "prompts": 64,
    "responses": 32,
    "kl": 0.01,
    "packing": "bins",
    "log_prob_micro_batch": 4,
}
# Optimizer states that go to the host and back by Tensor.to, whose host memory is pageable: 12 s for 22.9 GB of a GPU
# both ways (Qwen3 30B on 16 GPUs) and 9 s for 22 GB (235B on 128), NVIDIA-NeMo/RL pull request 1404. 3.8 and 4.9 GB/s
PAGEABLE = {"offload_gbps": 4.3}
SERIAL = {"async_scheduling": False}
# The asynchronous engine of vLLM, which the recipes of one step off ask for, names no usage context and so runs 128
# sequences at most in iterations of 2,048 tokens (vllm-project/vllm pull request 37393, NVIDIA-NeMo/RL 4221)
ENGINE_CONTEXT = SERIAL | {"max_seqs": 128, "max_tokens": 2048}
# The loop of vllm_worker.py that reads log-probs one by one, timed alone: 16 us a token on an AMD EPYC. 8 us more: the
# worker sets VLLM_ENABLE_V1_MULTIPROCESSING=0, so that detokenizing a token and storing its Logprob (vLLM 0.11,
# v1/engine/detokenizer.py and logprobs.py), timed alone too, comes between iterations. The worker of async_engine has a
# process for the engine, and reads while others are still generated
SYNC = SERIAL | {"token_us": 24.0}
ONE_STEP_OFF = {"placement": "apart", "asynchronous": True}


@dataclass(frozen=True)
class PublishedIteration:
    """A row: seconds of a step, tokens/s of a GPU, tokens of a response in the mean, and how it ran."""

    step_s: float
    tokens_per_s: float
    response: float
    nodes: int
    settings: Mapping[str, Any]
    cut: int = CUT
    samples: int = SAMPLES

    @property
    def prompt(self) -> float:
        """Tokens of a prompt in the mean."""
        return self.tokens_per_s * self.step_s * self.nodes * GPUS_PER_NODE / self.samples - self.response


LLAMA: dict[str, Any] = {
    "model": "llama3_1_8b", "pp": 2, "zero_stage": 1, "recompute": "full", "log_prob_micro_batch": 2
}  # fmt: skip
DENSE: dict[str, Any] = {"model": "qwen3_32b", "tp": 4, "pp": 4, "sequence_parallel": True, "zero_stage": 1}
SPARSE: dict[str, Any] = {"model": "qwen3_30b_a3b", "ep": 8, "zero_stage": 1}
LARGE: dict[str, Any] = {
    "model": "qwen3_235b_a22b", "pp": 8, "ep": 16, "sequence_parallel": True, "zero_stage": 1, "recompute": "full",
    "prompts": 16, "responses": 32, "log_prob_micro_batch": 1,
}  # fmt: skip
DEEPSEEK: dict[str, Any] = {
    "model": "deepseek_v3", "pp": 16, "ep": 16, "zero_stage": 1, "recompute": "full",
    "prompts": 32, "responses": 16, "log_prob_micro_batch": 1,
}  # fmt: skip
ROWS = {
    "Llama 3.1 8B, on policy": PublishedIteration(
        97.7, 1562, 1060, 2, LLAMA | {"rollout": {"kv_fraction": 0.6, **SYNC}}
    ),
    "Llama 3.1 8B, one step off": PublishedIteration(
        74.6, 2161, 1129, 2, LLAMA | ONE_STEP_OFF | {"rollout": {"gpus": 8, "kv_fraction": 0.8, **ENGINE_CONTEXT}}
    ),
    "Qwen3 32B, on policy": PublishedIteration(
        393, 540, 3206, 4, DENSE | {"rollout": {"tp": 4, "kv_fraction": 0.6, **SYNC}}
    ),
    "Qwen3 32B, one step off": PublishedIteration(
        215, 494, 3207, 8,
        DENSE | ONE_STEP_OFF | {"rollout": {"tp": 4, "gpus": 32, "kv_fraction": 0.8, **ENGINE_CONTEXT}},
    ),
    "Qwen3 30B A3B, on policy": PublishedIteration(
        225, 925, 3154, 4,
        SPARSE | {"tp": 2, "sequence_parallel": True, "rollout": {"tp": 4, "kv_fraction": 0.6, **SYNC}},
    ),
}  # fmt: skip
LATER = {
    "Qwen3 30B A3B, one step off": PublishedIteration(
        244, 864, 3158, 4,
        SPARSE | ONE_STEP_OFF | {"pp": 2, "rollout": {"tp": 2, "gpus": 16, "kv_fraction": 0.8, **ENGINE_CONTEXT}},
    ),
    "Qwen3 235B, on policy": PublishedIteration(
        506, 45.7, 5671, 16,
        LARGE | {"tp": 2, "cp": 2, "rollout": {"tp": 16, "kv_fraction": 0.6, **ENGINE_CONTEXT}}, 8192, 512,
    ),
    "Qwen3 235B, one step off": PublishedIteration(
        241, 52.2, 5691, 32,
        LARGE | ONE_STEP_OFF | {"tp": 4, "rollout": {"tp": 8, "gpus": 128, "kv_fraction": 0.8, **ENGINE_CONTEXT}},
        8192, 512,
    ),
    "DeepSeek V3, on policy": PublishedIteration(
        154, 11, 745, 32, DEEPSEEK | {"rollout": {"tp": 32, "kv_fraction": 0.6, **ENGINE_CONTEXT}}, 1536, 512
    ),
    "DeepSeek V3, one step off": PublishedIteration(
        77.9, 11.0, 744, 64,
        DEEPSEEK
        | ONE_STEP_OFF
        | {"log_prob_micro_batch": 2, "rollout": {"tp": 32, "gpus": 256, "kv_fraction": 0.8, **ENGINE_CONTEXT}},
        1536, 512,
    ),
}  # fmt: skip


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
    mean = uncut_mean(row.response, row.cut - row.prompt)
    lengths = {"prompt_len": {"mean": round(row.prompt)}, "response_len": {"mean": mean, "std": SPREAD * mean}}
    settings = {"seq_len": row.cut, "global_batch": 512, "nodes": row.nodes, **RECIPE, **lengths, **row.settings}
    settings |= {} if row.settings.get("placement") == "apart" else PAGEABLE
    return opcast.posttrain(**settings)


def lines(names: list[str]) -> Iterator[str]:
    """The table as Markdown."""
    yield "| run | published, s | P50, s | P10 to P90 | error | rollout | log-probs and training | sync, copies |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for name in names or [*ROWS, *LATER]:
        row = (ROWS | LATER)[name]
        report = answer(row)
        spread, rollout_s = report.iteration_s, report.phase_s("rollout")
        moving_s = sum(report.phase_s(name) for name in MOVING)
        trained_s = sum(phase.seconds for phase in report.phases) - rollout_s - moving_s
        error = 100.0 * (spread.p50 / row.step_s - 1.0)
        yield (
            f"| {name} | {row.step_s:g} | {spread.p50:.1f} | {spread.p10:.1f} to {spread.p90:.1f} | {error:+.1f} % "
            f"| {rollout_s:.1f} s | {trained_s:.1f} s | {moving_s:.1f} s |"
        )


def asked() -> argparse.Namespace:
    """The rows that the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("rows", nargs="*", choices=[[], *ROWS, *LATER], metavar="ROW", help="all, unless named")
    return parser.parse_args()


if __name__ == "__main__":
    for line in lines(asked().rows):
        print(line, flush=True)
