"""Published iterations of RL beside what ``opcast posttrain`` says of them: ``python tests/evidence/post_training.py``.

Figures are single ones of NeMo-RL's performance summary (v0.4, on-policy and one step off, DGX H100, bf16), at
https://github.com/NVIDIA-NeMo/RL/blob/main/docs/about/performance-summary.md; settings are those of its recipes
(``examples/configs/recipes/llm/performance``). Lengths: the mean response is published, the mean prompt follows from
tokens/s; how far lengths are spread is not published, so the usual spread of ``response_len`` is taken.

Mechanisms were sought on :data:`ROWS` first, and on the others (:data:`LATER`) too since: none of these is unseen.
:data:`NEXT` is the table of the release after (v0.5), asked as that of v0.4 is: it was looked at when all but vLLM's
draw of tokens, the pinned memory of weights and the lack of a tokenizer was told. :data:`PHASES` is that of v0.3, phase
by phase (https://github.com/NVIDIA-NeMo/RL/discussions/1161).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import opcast

GPUS_PER_NODE, SAMPLES, CUT = 8, 2048, 4096
LOG_PROBS = ("old log-probs", "swap of reference weights", "reference log-probs")  # one timer of NeMo-RL's
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
    # use_reference_model of its Megatron worker: weights to the host, those of the reference to GPUs, and back
    "swap_reference": True,
    # Optimizer states go to the host and back by Tensor.to, whose host memory is pageable: 12 s for 22.9 GB of a GPU
    # both ways (Qwen3 30B on 16 GPUs) and 9 s for 22 GB (235B on 128), NVIDIA-NeMo/RL pull request 1404: 3.8, 4.9 GB/s
    "offload_training": True,
    "offload_gbps": 4.3,
}
# That request, of 22 October 2025, ends it for log-probs on GPUs of their own; r0.4.0 had branched by the 9th (1329)
SINCE_1404 = {"offload_training": None, "offload_gbps": None}
SERIAL = {"async_scheduling": False}
# The asynchronous engine of vLLM, which the recipes of one step off ask for, names no usage context and so runs 128
# sequences at most in iterations of 2,048 tokens (vllm-project/vllm pull request 37393, NVIDIA-NeMo/RL 4221)
ENGINE_CONTEXT = SERIAL | {"max_seqs": 128, "max_tokens": 2048}
# The loop of vllm_worker.py that reads log-probs one by one, timed alone: 16 us a token on an AMD EPYC. 4 us more: the
# worker sets VLLM_ENABLE_V1_MULTIPROCESSING=0, so that storing a token's Logprob (vLLM 0.11, v1/engine/logprobs.py;
# nothing is detokenized: skip_tokenizer_init), timed alone too, comes between iterations. The worker of async_engine
# has a process for the engine, and reads while others are still generated
SYNC = SERIAL | {"token_us": 20.0}
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


# v0.5: step in s, tokens/s of a GPU, mean response, and layouts that changed
NEXT = {
    f"v0.5: {name}": replace(
        (before := (ROWS | LATER)[name]),
        step_s=step_s, tokens_per_s=rate, response=response, settings={**before.settings, **changed},
    )
    for name, step_s, rate, response, changed in (
        ("Llama 3.1 8B, on policy", 92.8, 1581, 1019, {}),
        ("Llama 3.1 8B, one step off", 64.8, 2478, 1123, {"pp": 1} | SINCE_1404),
        ("Qwen3 32B, on policy", 376, 571, 3251, {}),
        ("Qwen3 32B, one step off", 200, 538, 3252, SINCE_1404),
        ("Qwen3 30B A3B, on policy", 198, 1066, 3196,
         {"tp": 1, "sequence_parallel": False, "rollout": {"tp": 2, "kv_fraction": 0.6, **SYNC}}),
        ("Qwen3 30B A3B, one step off", 154, 1391, 3201, SINCE_1404),
        ("Qwen3 235B, on policy", 431, 54.1, 5700, {}),
        ("Qwen3 235B, one step off", 203, 58.7, 5707, SINCE_1404),
        ("DeepSeek V3, on policy", 134, 12.7, 744, {}),
        ("DeepSeek V3, one step off", 64.9, 13.1, 738, SINCE_1404),
    )
}  # fmt: skip


@dataclass(frozen=True)
class PublishedPhases:
    """A row of v0.3: seconds of a step and of its phases (training, log-probs, generation, refit), and how it ran.

    Prompts are those of v0.4.
    """

    step_s: float
    phases_s: tuple[float, float, float, float]
    response: float
    prompt: float
    nodes: int
    settings: Mapping[str, Any]
    cut: int = CUT


# examples/configs/grpo_math_8B_megatron.yaml, 70B, qwen30ba3b (sequence_packing.enabled: False, so that sequences are
# padded to the longest); of Qwen3 32B the layout that the table names
PHASES = {
    "v0.3: Llama 3.1 8B": PublishedPhases(
        112, (28, 18, 58, 5), 795, 132, 1,
        {"model": "llama3_1_8b", "zero_stage": 1, "rollout": {"kv_fraction": 0.6, **SYNC}},
    ),
    "v0.3: Llama 3.1 70B": PublishedPhases(
        147, (28, 18, 84, 14), 398, 132, 8,
        {"model": "llama3_70b", "tp": 4, "pp": 4, "zero_stage": 1, "rollout": {"tp": 4, "kv_fraction": 0.6, **SYNC}},
    ),
    "v0.3: Qwen3 32B": PublishedPhases(
        213, (68, 40, 96, 7), 3283, 110, 8, DENSE | {"pp": 2, "rollout": {"tp": 4, "kv_fraction": 0.6, **SYNC}}
    ),
    "v0.3: Qwen3 30B A3B": PublishedPhases(
        167, (50, 23, 78, 12), 3251, 110, 8,
        SPARSE
        | {"tp": 2, "sequence_parallel": True, "packing": "none", "rollout": {"tp": 4, "kv_fraction": 0.7, **SYNC}},
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


def answer(row: PublishedIteration | PublishedPhases) -> Any:
    """What opcast says of a row."""
    mean = uncut_mean(row.response, row.cut - row.prompt)
    lengths = {"prompt_len": {"mean": round(row.prompt)}, "response_len": {"mean": mean, "std": SPREAD * mean}}
    settings = {"seq_len": row.cut, "global_batch": 512, "nodes": row.nodes, **RECIPE, **lengths, **row.settings}
    return opcast.posttrain(**settings)


def step_line(name: str, row: PublishedIteration) -> str:
    """A row of the table of steps."""
    report = answer(row)
    spread, rollout_s = report.iteration_s, report.phase_s("rollout")
    moving_s = sum(report.phase_s(name) for name in MOVING)
    trained_s = sum(phase.seconds for phase in report.phases) - rollout_s - moving_s
    error = 100.0 * (spread.p50 / row.step_s - 1.0)
    return (
        f"| {name} | {row.step_s:g} | {spread.p50:.1f} | {spread.p10:.1f} to {spread.p90:.1f} | {error:+.1f} % "
        f"| {rollout_s:.1f} s | {trained_s:.1f} s | {moving_s:.1f} s |"
    )


def phase_line(name: str, row: PublishedPhases) -> str:
    """A row of the table of phases, published beside predicted."""
    report = answer(row)
    predicted_s = (
        report.phase_s("training"),
        sum(report.phase_s(name) for name in LOG_PROBS),
        report.phase_s("rollout"),
        sum(report.phase_s(name) for name in MOVING),
    )
    parts = " | ".join(f"{row_s:g}, {own_s:.1f}" for row_s, own_s in zip(row.phases_s, predicted_s, strict=True))
    return f"| {name} | {row.step_s:g}, {report.iteration_s.p50:.1f} | {parts} |"


def lines(names: list[str]) -> Iterator[str]:
    """The tables as Markdown."""
    steps = {name: row for name, row in (ROWS | LATER | NEXT).items() if not names or name in names}
    if steps:
        yield "| run | published, s | P50, s | P10 to P90 | error | rollout | log-probs and training | sync, copies |"
        yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
        yield from (step_line(name, row) for name, row in steps.items())
    phases = {name: row for name, row in PHASES.items() if not names or name in names}
    if phases:
        yield "| run: published, predicted, s | step | training | log-probs | rollout | sync, copies |"
        yield "| --- | --- | --- | --- | --- | --- |"
        yield from (phase_line(name, row) for name, row in phases.items())


def asked() -> argparse.Namespace:
    """The rows that the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "rows", nargs="*", choices=[[], *ROWS, *LATER, *NEXT, *PHASES], metavar="ROW", help="all, unless named"
    )
    return parser.parse_args()


if __name__ == "__main__":
    for line in lines(asked().rows):
        print(line, flush=True)
