"""The timer on clocks that tests drive, on a sleep of known length, and on real ops."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from opcast.datasets.ops import make_op  # noqa: E402
from opcast.harness.cases import Prepared, Unsupported, prepare  # noqa: E402
from opcast.harness.environment import Clocks  # noqa: E402
from opcast.harness.host_timer import HOST_SAMPLE_US, calls_per_sample  # noqa: E402
from opcast.harness.stopping import MedianWidth  # noqa: E402
from opcast.harness.timer import (  # noqa: E402
    MOST_RETRIES,
    MOST_SAMPLES,
    Timing,
    collect,
    measure,
    summarise,
)

OP = make_op("host_overhead", what="module")


class Hand:
    """A clock that only moves when told to."""

    def __init__(self) -> None:
        self.ns = 0
        self.pauses: list[float] = []

    def now(self) -> int:
        return self.ns

    def advance(self, microseconds: float) -> None:
        self.ns += round(microseconds * 1000)

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.advance(seconds * 1e6)


def after(count: int):
    """A rule that stops after so many samples."""
    return lambda samples: len(samples) >= count


def prepared_of(run) -> Prepared:
    return Prepared(OP, "torch", "cpu", 0, run, 0)


def noisy(hand: Hand, mean_us: float, spread: float, seed: int = 0, every: int = 0, outlier_us: float = 0.0):
    """A call that moves the clock by a random time, with a long one now and then."""
    random = np.random.default_rng(seed)
    calls = 0

    def run() -> None:
        nonlocal calls
        calls += 1
        hand.advance(mean_us * random.lognormal(0, spread) + (outlier_us if every and calls % every == 0 else 0.0))

    return run


@dataclass
class Reading:
    throttled: bool | None


def test_a_steady_call_is_timed_exactly():
    hand = Hand()
    timing = measure(prepared_of(lambda: hand.advance(250.0)), now_ns=hand.now)
    assert timing.latency_us == timing.latency_min_us == timing.latency_p90_us == timing.latency_mean_us == 250.0
    assert timing.latency_std_us == 0
    assert timing.converged
    assert timing.timer == "cpu_clock"
    assert timing.cache == "warm"
    assert not timing.throttled


def test_short_calls_are_timed_many_at_a_time():
    hand = Hand()
    timing = measure(prepared_of(lambda: hand.advance(0.5)), now_ns=hand.now)
    assert timing.latency_us == pytest.approx(0.5)
    assert timing.iterations == timing.samples * HOST_SAMPLE_US / 0.5


@pytest.mark.parametrize(("call_us", "calls"), [(100.0, 1), (20.0, 1), (10.0, 10), (1.0, 100), (0.0, 10_000)])
def test_calls_per_sample(call_us: float, calls: int):
    assert calls_per_sample(call_us) == calls


def test_the_interval_is_honest():
    """Converged medians lie within the width they claim, as often as the confidence says, whatever the noise."""
    hits = 0
    for seed in range(60):
        hand = Hand()
        timing = measure(prepared_of(noisy(hand, 100.0, 0.15, seed)), ci_width=0.04, budget_s=2, now_ns=hand.now)
        assert timing.converged
        hits += abs(timing.latency_us - 100.0) <= 4.0
    assert hits >= 56


def test_outliers_move_the_mean_but_not_the_median():
    hand = Hand()
    run = noisy(hand, 100.0, 0.01, every=20, outlier_us=50_000.0)
    timing = measure(prepared_of(run), stopping=after(400), budget_s=100, now_ns=hand.now)
    assert timing.latency_us == pytest.approx(100.0, rel=0.01)
    assert timing.latency_p90_us < 103
    assert timing.latency_mean_us > 1000
    assert timing.latency_min_us <= timing.latency_p10_us <= timing.latency_us <= timing.latency_p90_us


def test_the_budget_ends_what_does_not_converge():
    hand = Hand()
    timing = measure(prepared_of(noisy(hand, 1000.0, 1.5)), ci_width=1e-6, budget_s=0.3, now_ns=hand.now)
    assert not timing.converged
    assert 0.25e9 < hand.ns < 0.6e9


def test_a_call_longer_than_the_budget_is_still_measured():
    hand = Hand()
    timing = measure(prepared_of(lambda: hand.advance(5e6)), budget_s=1.0, now_ns=hand.now)
    assert timing.latency_us == 5e6
    assert timing.samples == 1
    assert not timing.converged


def test_samples_have_an_upper_bound():
    found = collect(lambda n: [1.0, 2.0] * (n // 2 + 1), lambda samples: False, 2**62, now_ns=lambda: 0)
    assert MOST_SAMPLES <= len(found.values) <= 1.5 * MOST_SAMPLES
    assert not found.converged


def test_throttled_samples_are_discarded_and_taken_again():
    hand = Hand()
    readings = iter([Reading(True)] * 3 + [Reading(False)] * 10_000)
    slow = iter([200.0] * 3)

    def take(count: int) -> list[float]:
        return [next(slow, 100.0) for _ in range(count)]

    found = collect(take, MedianWidth(0.01), 10**12, lambda: next(readings), hand.now, hand.pause)
    assert set(found.values) == {100.0}
    assert found.discarded == 3
    assert not found.throttled
    assert len(hand.pauses) == 3


def test_what_is_always_throttled_is_kept_and_marked():
    hand = Hand()
    found = collect(lambda n: [100.0] * n, after(20), 10**12, lambda: Reading(True), hand.now, hand.pause)
    assert found.throttled
    assert len(found.values) >= 20
    assert len(hand.pauses) == MOST_RETRIES


def test_unknown_clocks_are_not_throttled():
    found = collect(lambda n: [1.0] * n, after(5), 10**12, lambda: Clocks(), now_ns=lambda: 0)
    assert not found.throttled
    assert found.discarded == 0


def test_summary_counts_every_call():
    found = collect(lambda n: [1.0] * n, after(5), 10**12, now_ns=lambda: 0)
    timing = summarise(found, 7, "cpu_clock", "cold")
    assert timing.iterations == 7 * timing.samples
    assert "converged" not in timing.columns()
    assert timing.columns()["latency_us"] == 1.0


def test_a_sleep_of_known_length_is_timed_within_a_few_percent():
    timing = measure(prepared_of(lambda: time.sleep(0.004)), stopping=after(100), budget_s=10.0)
    assert timing.latency_us >= 4000
    assert timing.latency_min_us == pytest.approx(4000, rel=0.05)


def test_no_collection_runs_meanwhile():
    seen = []
    measure(prepared_of(lambda: seen.append(gc.isenabled())), budget_s=0.01)
    assert not any(seen)
    assert gc.isenabled()


def test_gradients_are_off_meanwhile():
    seen = []
    measure(prepared_of(lambda: seen.append(torch.is_grad_enabled())), budget_s=0.01)
    assert not any(seen)
    assert torch.is_grad_enabled()


def test_an_unknown_cache_state_is_refused():
    with pytest.raises(ValueError, match="neither cold nor warm"):
        measure(prepared_of(lambda: None), cache="tepid")


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def by_processor_time(prepared: Prepared, budget_s: float, cache: str = "warm") -> Timing:
    """Timed by this process's own processor time: other work on the machine does not count."""
    return measure(prepared, cache=cache, budget_s=budget_s, now_ns=time.process_time_ns)


@pytest.mark.usefixtures("one_thread")
def test_latency_follows_the_work():
    small, large = (
        by_processor_time(prepare(make_op("gemm", "fp32", m=n, n=n, k=n), "torch", "cpu"), 0.3).latency_min_us
        for n in (128, 512)
    )
    assert 15 < large / small < 250, "64 times the FLOPs"


@pytest.mark.usefixtures("one_thread")
def test_attention_follows_the_square_of_the_sequence():
    def best(seq: int) -> float:
        op = make_op(
            "attention_prefill", "fp32", heads_q=4, heads_kv=4, head_dim=64, v_head_dim=64, seq_q=seq, seq_kv=seq
        )
        return by_processor_time(prepare(op, "sdpa", "cpu"), 0.3).latency_min_us

    assert best(1024) > 6 * best(256)


@pytest.mark.usefixtures("one_thread")
def test_cold_inputs_take_longer_than_warm_ones():
    prepared = prepare(make_op("elementwise", "fp32", numel=1 << 18, inputs=2), "torch", "cpu")
    warm, cold = (by_processor_time(prepared, 0.5, cache) for cache in ("warm", "cold"))
    assert cold.cache == "cold"
    assert cold.latency_min_us > 1.03 * warm.latency_min_us  # 1.1 where other guests use the machine's cache, too


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("what", ["launch", "dispatch", "view", "module", "autograd", "operator"])
def test_host_overhead_grows_with_the_calls(what: str):
    few, many = (
        by_processor_time(prepare(make_op("host_overhead", what=what, calls=n), "torch", "cpu"), 0.2).latency_min_us
        for n in (120, 480)
    )
    assert 2 < many / few < 8


# --- on a GPU ------------------------------------------------------------------------------------------

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")


@pytest.mark.gpu
@needs_gpu
def test_large_product_on_the_gpu_reaches_a_believable_rate():
    op = make_op("gemm", "bf16", m=4096, n=4096, k=4096)
    timing = measure(prepare(op, "cublas", "cuda"), budget_s=1.0)
    assert timing.timer == "cuda_graph"
    assert 30 < op.cost.flops / timing.latency_us / 1e6 < 5000


@pytest.mark.gpu
@needs_gpu
def test_a_cold_copy_is_slower_than_a_warm_one():
    prepared = prepare(make_op("copy", size_bytes=8 << 20), "torch", "cuda")
    warm, cold = (measure(prepared, cache=cache) for cache in ("warm", "cold"))
    assert cold.latency_us > warm.latency_us


@pytest.mark.gpu
@needs_gpu
def test_cold_and_warm_agree_where_the_cache_does_not_matter():
    prepared = prepare(make_op("gemm", "bf16", m=4096, n=4096, k=4096), "cublas", "cuda")
    warm, cold = (measure(prepared, cache=cache).latency_us for cache in ("warm", "cold"))
    assert cold == pytest.approx(warm, rel=0.15)


@pytest.mark.gpu
@needs_gpu
def test_what_cannot_be_captured_falls_back_to_events():
    op = make_op("attention_backward", "bf16", heads_q=4, heads_kv=4, head_dim=64, v_head_dim=64, seq_q=256, seq_kv=256)
    timing = measure(prepare(op, "math", "cuda"))
    assert timing.timer == "cuda_event"
    assert timing.latency_us > 5


@pytest.mark.gpu
@needs_gpu
def test_capture_failure_falls_back_to_events():
    from dataclasses import replace

    prepared = prepare(make_op("elementwise", "fp32", numel=1 << 20), "torch", "cuda")
    waits = replace(prepared, run=lambda: prepared.run().sum().item())
    assert measure(waits, budget_s=0.5).timer == "cuda_event"
    assert measure(prepared, budget_s=0.5).timer == "cuda_graph"


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("cache", ["warm", "cold"])
def test_two_measurements_on_the_gpu_agree(cache: str):
    prepared = prepare(make_op("gemm", "bf16", m=2048, n=2048, k=2048), "cublas", "cuda")
    first, second = (measure(prepared, cache=cache).latency_us for _ in range(2))
    assert first == pytest.approx(second, rel=0.03)


@pytest.mark.gpu
@needs_gpu
def test_host_overhead_on_the_gpu_is_host_time():
    timing = measure(prepare(make_op("host_overhead", what="launch", calls=100), "torch", "cuda"))
    assert timing.timer == "cpu_clock"
    assert 0.5 < timing.latency_us / 100 < 50


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("cache", ["warm", "cold"])
@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm", "softmax", "silu_mul", "gelu", "rms_norm_backward"])
def test_every_backend_of_a_row_op_is_measured_on_the_gpu(kind: str, cache: str):
    from opcast.harness.cases import backends

    op = make_op(kind, "bf16", rows=2048, cols=4096)
    for backend in backends(op, "cuda"):
        try:
            prepared = prepare(op, backend, "cuda")
        except Unsupported:
            continue  # a kernel of a package that is not here
        timing = measure(prepared, cache=cache, budget_s=0.3)
        assert 1 < timing.latency_us < 10_000
        assert timing.cache == cache
