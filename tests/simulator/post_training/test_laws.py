"""Laws of post-training: what more GPUs, longer tails or another placement can never do."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opcast.datasets.clusters import load_cluster
from opcast.simulator.post_training.groups import ALL, ROLLOUT, TRAINING, apart, splits
from opcast.simulator.post_training.lengths import LengthBatch, MicroBatches, batch_of, micro_batches
from opcast.simulator.post_training.phases import ROLL, SYNC, TRAIN, Phase
from opcast.simulator.post_training.request import (
    PostTrainRequest,
    PromptLengths,
    ResponseLengths,
    RolloutEngine,
)
from opcast.simulator.post_training.rollout import RolloutReplicas, roll_out
from opcast.simulator.post_training.schedule import idle_shares, iteration_times, timeline
from opcast.simulator.question.canonical import RequestError
from opcast.simulator.question.plan import Parallel
from opcast.simulator.question.requests import SimulateRequest
from opcast.simulator.question.serving import IterationLaw, KvMemory, Scheduler, ServingRequest
from opcast.simulator.question.traffic import RequestTraffic
from opcast.simulator.question.work import Work
from opcast.simulator.serving.replica import by_hand

LAW = IterationLaw(base_us=5000.0, decode_us=20.0, decode_context_us=0.01, prefill_token_us=10.0)
NODE = load_cluster("dgx_h100")
RESPONSES = st.lists(st.integers(1, 60), min_size=1, max_size=16)


def replicas(count: int, blocks: int = 4096) -> RolloutReplicas:
    """Replicas whose iterations take what :data:`LAW` says."""
    request = ServingRequest(
        law=LAW,
        kv=KvMemory(blocks=blocks),
        traffic=RequestTraffic(arrival="closed", concurrency=1, requests=1),
        scheduler=Scheduler(prefix_caching=True),
        intervals=False,
    )
    return RolloutReplicas(request, by_hand(LAW, blocks, 16, 1.0), count)


def batch(responses: list[int], of_prompt: int = 1, prompt: int = 50) -> LengthBatch:
    return LengthBatch(np.full(len(responses), prompt), np.array(responses), of_prompt)


def asked(nodes: int = 2, tp: int = 1, pp: int = 1, seq_len: int = 2048, **more: object) -> PostTrainRequest:
    """A request on nodes of eight GPUs."""
    cluster = NODE if nodes == 1 else type(NODE)(**{**vars(NODE), "nodes": nodes})
    work = Work(seq_len=seq_len, micro_batch=2)
    parallel = Parallel(tp=tp, pp=pp)
    step = SimulateRequest(model="llama3_8b", work=work, device=NODE.device, cluster=cluster, parallel=parallel)
    return PostTrainRequest(step=step, **more)  # type: ignore[arg-type]


@settings(max_examples=8, deadline=None)
@given(RESPONSES, st.integers(1, 4))
def test_twice_the_replicas_are_never_slower(responses: list[int], count: int) -> None:
    assert replicas(2 * count).play(batch(responses)).seconds <= replicas(count).play(batch(responses)).seconds + 1e-9


@settings(max_examples=8, deadline=None)
@given(RESPONSES, st.integers(0, 15), st.integers(1, 80))
def test_a_longer_tail_is_never_faster(responses: list[int], which: int, more: int) -> None:
    longer = list(responses)
    longer[which % len(longer)] += more
    assert replicas(2).play(batch(longer)).seconds >= replicas(2).play(batch(responses)).seconds - 1e-9


def test_a_wider_spread_of_the_same_mean_takes_longer() -> None:
    seconds = []
    for std in (0.0, 50.0, 200.0):
        lengths = ResponseLengths(mean=100, std=std)
        request = asked(response_len=lengths, prompt_len=PromptLengths(mean=50), prompts=8, seq_len=100_000)
        seconds.append(replicas(4).play(batch_of(request, 0)).seconds)
    assert seconds == sorted(seconds)
    assert seconds[-1] > 1.5 * seconds[0]


def test_a_batch_ends_with_its_longest_response() -> None:
    alone = replicas(1).play(batch([400])).seconds
    rolled = replicas(8).play(batch([10] * 7 + [400]))
    assert rolled.seconds == pytest.approx(alone)
    assert rolled.tail_share > 0.2
    assert rolled.running_share < 0.5


def test_responses_to_a_prompt_share_its_keys_and_values() -> None:
    long_prompt = [4] * 8
    alike = replicas(1).play(batch(long_prompt, of_prompt=8, prompt=4000)).seconds
    apart_ = replicas(1).play(batch(long_prompt, of_prompt=1, prompt=4000)).seconds
    assert apart_ > 2 * alike


def test_what_does_not_fit_is_one_line() -> None:
    with pytest.raises(RequestError, match="does not fit into the KV memory"):
        replicas(1, blocks=4).play(batch([400]))


@settings(max_examples=2, deadline=None)
@given(st.floats(0.25, 2.0), st.integers(0, 9))
def test_partial_rollouts_end_sooner_and_bring_as_many_responses(partial: float, seed: int) -> None:
    request = asked(
        prompts=8,
        responses=4,
        seed=seed,
        batches=2,
        partial=partial,
        prompt_len=PromptLengths(mean=50),
        response_len=ResponseLengths(mean=60, std=90),
    )
    parts = roll_out(replicas(4), request, [batch_of(request, index) for index in range(2)])
    for each in parts:
        assert len(each.batch.total) == 32
        assert each.seconds <= max(each.ends_s) + 1e-9
    assert len(parts) == 2


def test_partial_rollouts_are_quicker_where_the_tail_is_long() -> None:
    settings_ = {"prompts": 16, "responses": 2, "response_len": ResponseLengths(mean=60, std=120), "batches": 4}
    whole, part = asked(**settings_), asked(partial=1.0, **settings_)  # type: ignore[arg-type]
    batches = [batch_of(whole, index) for index in range(4)]
    mean_s = [
        float(np.mean([each.seconds for each in roll_out(replicas(4), request, batches)])) for request in (whole, part)
    ]
    assert mean_s[1] < 0.8 * mean_s[0]


SECONDS = st.floats(0.01, 1000.0)


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=2, max_size=8), st.floats(0.0, 10.0))
def test_one_step_off_is_never_slower_than_in_turns(pairs: list[tuple[float, float]], sync_s: float) -> None:
    rollout_s, training_s = (np.array([column]) for column in zip(*pairs, strict=True))
    off = iteration_times(rollout_s, training_s, sync_s, True)
    turns = iteration_times(rollout_s, training_s, sync_s, False)
    assert off.iteration_s.sum() <= turns.iteration_s.sum() + 1e-6


@given(st.floats(0.1, 100), st.lists(st.floats(0.1, 100), min_size=1, max_size=4), st.floats(0.01, 5), st.booleans())
def test_a_group_is_never_in_two_phases(rollout_s: float, training: list[float], sync_s: float, off: bool) -> None:
    phases = [
        Phase(ROLL, ROLLOUT, rollout_s),
        *(Phase(TRAIN, TRAINING, seconds) for seconds in training),
        Phase(SYNC, ALL, sync_s),
    ]
    spans = timeline(phases, off, iterations=4)
    for group in (ROLLOUT, TRAINING):
        busy = sorted((span.start_s, span.end_s) for span in spans if span.group in (group, ALL))
        for (_, end_s), (start_s, _) in pairwise(busy):
            assert start_s >= end_s - 1e-6
    for number in range(4):  # a batch is trained on once it is rolled out, and its weights are there
        rolled = max(span.end_s for span in spans if span.name == ROLL and span.batch == number)
        trained = min(span.start_s for span in spans if span.name == TRAIN and span.batch == number)
        assert trained >= rolled - 1e-6


def test_the_timeline_takes_what_iterations_take() -> None:
    phases = [Phase(ROLL, ROLLOUT, 30.0), Phase(TRAIN, TRAINING, 20.0), Phase(SYNC, ALL, 1.0)]
    starts = [span.start_s for span in timeline(phases, True, 5) if span.name == SYNC]
    times = iteration_times(np.array([[30.0, 30.0]]), np.array([[20.0, 20.0]]), 1.0, True)
    assert np.diff(starts) == pytest.approx(float(times.iteration_s[0, 0]))
    assert idle_shares(phases, 31.0) == pytest.approx({ROLLOUT: 0.0, TRAINING: 10.0 / 31.0})


@given(st.integers(0, 50), st.sampled_from([(1, 1), (2, 1), (2, 2)]))
def test_micro_batches_have_all_tokens(seed: int, degrees: tuple[int, int]) -> None:
    request = asked(tp=degrees[0], pp=degrees[1], prompts=64, responses=8, seed=seed)
    batches = [batch_of(request, index) for index in range(3)]
    micro = micro_batches(request, batches, 16)
    ranks = 16 // (degrees[0] * degrees[1])
    tokens = np.mean([batch.tokens for batch in batches])
    assert micro.count * micro.micro_batch * micro.seq_len * ranks == pytest.approx(tokens, rel=0.02)
    assert micro.micro_batch * micro.seq_len <= 2 * 2048 * 1.02


def test_a_sequence_is_not_shared_over_data_ranks() -> None:
    request = asked(prompts=1, responses=1)
    lone = batch_of(request, 0)
    assert micro_batches(request, [lone], 16) == MicroBatches(lone.tokens, 1, 1)


def test_padded_sequences_are_as_long_as_the_longest() -> None:
    request = asked(packing="none", prompts=64, responses=8)
    micro = micro_batches(request, [batch_of(request, 0)], 16)
    assert micro.seq_len == int(batch_of(request, 0).total.max())
    assert micro.count * micro.micro_batch * 16 == request.sequences


def test_lengths_have_their_mean_and_are_cut() -> None:
    request = asked(prompts=4000, responses=8, seq_len=100_000)
    lengths = batch_of(request, 0)
    assert lengths.response.mean() == pytest.approx(1024, rel=0.02)
    assert lengths.response.std() == pytest.approx(768, rel=0.05)
    assert batch_of(asked(prompts=400, seq_len=512), 0).total.max() == 512


def test_lengths_of_a_file(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("lengths") / "lengths.csv"
    path.write_text("prompt_tokens,response_tokens\n10,100\n20,200\n")
    batch_ = batch_of(asked(lengths=str(path), prompts=50, responses=2), 0)
    assert set(batch_.prompt.tolist()) == {10, 20}
    assert set(batch_.response.tolist()) == {100, 200}
    path.write_text("prompt,response\n10,100\n")
    with pytest.raises(RequestError, match="prompt_tokens and response_tokens"):
        batch_of(asked(lengths=str(path)), 0)


def test_splits_are_whole_replicas_and_whole_copies() -> None:
    request = asked(nodes=1, tp=2, placement="apart", rollout=RolloutEngine(tp=2))
    assert splits(request) == [2, 4, 6]
    groups = apart(request, 6)
    assert (groups.training.devices, groups.rollout_gpus, groups.gpus) == (2, 6, 8)
    assert splits(asked(nodes=4, tp=8, placement="apart")) == [8, 16, 24]
    with pytest.raises(RequestError, match="no split leaves whole replicas"):
        splits(asked(nodes=1, tp=8, placement="apart"))
