"""Bins, log-probs in their own micro-batches, what reading tokens costs, and energy: laws of each."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import opcast
from opcast.datasets.clusters import load_cluster
from opcast.datasets.devices import load_device
from opcast.models import clocks
from opcast.simulator.job.request import JobEnergy
from opcast.simulator.post_training.energy import WAITING, iteration_kwh, phase_kwh
from opcast.simulator.post_training.groups import ALL, ROLLOUT, TRAINING, GpuGroups
from opcast.simulator.post_training.lengths import batch_of, filled_bins, micro_batches
from opcast.simulator.post_training.phases import ROLL, SYNC, TRAIN, Phase
from opcast.simulator.post_training.request import PostTrainRequest, ResponseLengths, RolloutEngine
from opcast.simulator.question.canonical import RequestError
from opcast.simulator.question.plan import Parallel
from opcast.simulator.question.requests import SimulateRequest
from opcast.simulator.question.work import Work

NODE = load_cluster("dgx_h100")
GPU = load_device("h100_sxm")


def asked(pp: int = 1, **more: object) -> PostTrainRequest:
    """A request on one node."""
    work, layout = Work(seq_len=2048, micro_batch=1), Parallel(pp=pp)
    step = SimulateRequest(model="llama3_8b", work=work, device=NODE.device, cluster=NODE, parallel=layout)
    return PostTrainRequest(step=step, prompts=64, responses=8, **more)  # type: ignore[arg-type]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=60))
def test_bins_hold_all_tokens_and_no_two_would_fit_into_one(lengths: list[int]) -> None:
    bins = filled_bins(np.array(lengths), 100)
    assert bins.sum() == sum(lengths)
    assert bins.max() <= 100
    assert len(bins) == 1 or sum(sorted(bins)[:2]) > 100


def test_stages_of_a_pipeline_pad_bins_to_the_fullest() -> None:
    tokens = {}
    for pp in (1, 2):
        for packing in ("balanced", "bins"):
            request = asked(pp, packing=packing)
            micro = micro_batches(request, [batch_of(request, 0)], 8)
            tokens[pp, packing] = micro.tokens * 8 / pp
    real = batch_of(asked(), 0).tokens
    assert tokens[1, "bins"] == pytest.approx(real, rel=0.03)
    assert tokens[2, "balanced"] == pytest.approx(real, rel=0.03)
    assert tokens[2, "bins"] > 1.02 * real


def test_bins_of_log_probs_fill_better_than_those_of_training() -> None:
    """Of sequences of which no two fit into one bin of training."""
    lengths = ResponseLengths(kind="uniform", low=900, high=1700)
    request = asked(2, packing="bins", response_len=lengths)
    batch = [batch_of(request, 0)]
    assert micro_batches(request, batch, 8, 8).tokens < micro_batches(request, batch, 8).tokens


@pytest.mark.parametrize(
    ("settings_", "why"),
    [
        ({"packing": "true"}, "packing=.true"),
        ({"log_prob_micro_batch": 0}, "log_prob_micro_batch=0"),
        ({"offload_gbps": 0}, "offload_gbps=0"),
    ],
)
def test_bad_settings_are_named(settings_: dict[str, object], why: str) -> None:
    with pytest.raises(RequestError, match=why):
        asked(**settings_)


def test_bad_settings_of_the_engine_are_named() -> None:
    with pytest.raises(RequestError, match=r"rollout\.token_us=-1"):
        RolloutEngine(token_us=-1)
    with pytest.raises(RequestError, match=r"rollout\.async_scheduling"):
        RolloutEngine(async_scheduling="no")  # type: ignore[arg-type]


def phases(watts: float | None = 500.0) -> tuple[Phase, ...]:
    rolled = Phase(ROLL, ROLLOUT, 30.0, gpu_w=watts)
    return (rolled, Phase(TRAIN, TRAINING, 20.0, gpu_w=600.0), Phase(SYNC, ALL, 2.0, gpu_w=clocks.idle_w(GPU)))


def halves() -> GpuGroups:
    """Four GPUs that train and four that roll out."""
    half = replace(NODE, devices_per_node=4)
    return GpuGroups(half, half, False, 1)


def test_phases_and_waiting_add_up_to_the_iteration() -> None:
    """One in turns on two groups: 52 s, of which each group waits while the other works."""
    groups, energy = halves(), JobEnergy(pue=1.2, node_w=2000.0)
    parts = phase_kwh(phases(), groups, GPU, energy, 52.0)
    seconds = {
        name: np.array([[value]]) for name, value in (("rollout", 30.0), ("training", 20.0), ("iteration", 52.0))
    }
    whole = iteration_kwh(phases(), groups, GPU, energy, seconds)
    assert whole is not None
    assert sum(parts.values()) == pytest.approx(float(whole[0, 0]))
    assert parts[WAITING] == pytest.approx(1.2 * 4 * 50 * clocks.idle_w(GPU) / 3.6e6)
    assert parts["hosts"] == pytest.approx(1.2 * 2000 * 52 / 3.6e6)
    assert parts[ROLL] == pytest.approx(1.2 * 4 * 30 * 500 / 3.6e6)


def test_gpus_that_always_work_never_wait() -> None:
    """Sums of seconds round: 0.4 + 0.3 + 0.2 + 0.1 on eight GPUs is a little less than 8."""
    busy = tuple(Phase(f"phase {at}", ALL, seconds, gpu_w=500.0) for at, seconds in enumerate((0.4, 0.3, 0.2, 0.1)))
    parts = phase_kwh(busy, GpuGroups(NODE, NODE, True, 1), GPU, JobEnergy(), 1.0)
    assert list(parts) == [phase.name for phase in busy]


def test_without_watts_there_is_no_energy() -> None:
    assert phase_kwh(phases(None), halves(), GPU, JobEnergy(), 52.0) == {}
    assert iteration_kwh(phases(None), halves(), GPU, JobEnergy(), {}) is None


def test_nemo_rl_hides_no_tensor_parallel_communication_and_adds_gradients_apart() -> None:
    """What pretraining recipes of Megatron-Core hide or fuse, its policy workers do not."""
    step = {"workload": "train", "cluster": "dgx_h100", "tp": 2, "seq_len": 512, "global_batch": 8}
    recipe, policy = (
        opcast.simulate("tiny_llama_100m", stack=stack, **step).breakdown for stack in ("megatron", "nemo_rl")
    )
    assert policy.exposed_comm_s > recipe.exposed_comm_s
    apart_s = [
        sum(row.time_s for row in each.by_op if row.kind in ("elementwise", "softmax")) for each in (recipe, policy)
    ]
    assert apart_s[1] > apart_s[0]
    kinds = {row.kind for row in policy.by_op}
    assert "softmax_backward" in kinds
    assert not kinds & {"cross_entropy", "cross_entropy_backward"}
