"""What the GPU's timers report against an event model of streams, graphs and caches that knows the true durations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from opcast.datasets.device_names import seen_device_id  # noqa: E402
from opcast.datasets.ops import make_op  # noqa: E402
from opcast.harness import collective_timer, cuda_timer  # noqa: E402
from opcast.harness.cases import BUILDERS, Inputs, Prepared, Unsupported, refusals  # noqa: E402
from opcast.harness.cases.base import Builder  # noqa: E402
from opcast.harness.gpu_cache import last_level_bytes  # noqa: E402
from opcast.harness.stopping import MedianWidth  # noqa: E402
from opcast.harness.timer import CLOCKS_EVERY_NS, Timing, collect, measure  # noqa: E402

from .stream_model import MIB, ModelGPU  # noqa: E402

OP = make_op("gelu", rows=4, cols=4)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModelGPU:
    return ModelGPU().install(monkeypatch.setattr)


def timed(
    gpu: ModelGPU,
    run: Callable[[], object],
    cache: str = "warm",
    capturable: bool = True,
    budget_s: float = 0.05,
) -> Timing:
    def rest(seconds: float) -> None:
        gpu.host_us += 1e6 * seconds

    prepared = Prepared(OP, "torch", "cuda", 0, run, 0, "device", capturable)
    return measure(prepared, cache=cache, budget_s=budget_s, now_ns=gpu.now_ns, pause=rest)


# --- one operator --------------------------------------------------------------------------------------


@pytest.mark.parametrize("us", [0.8, 3.0, 40.0, 3000.0])
@pytest.mark.parametrize(("capturable", "timer"), [(True, "cuda_graph"), (False, "cuda_event")])
def test_a_kernel_takes_as_long_as_it_does(gpu: ModelGPU, us: float, capturable: bool, timer: str) -> None:
    timing = timed(gpu, lambda: gpu.kernel(us), capturable=capturable)
    assert timing.timer == timer
    assert timing.latency_us == pytest.approx(us, rel=0.02)


def test_work_on_another_stream_is_not_taken_for_an_empty_graph(gpu: ModelGPU) -> None:
    """As autograd does it: the graph holds nothing, and its launch alone lasts as long as several short kernels."""
    gpu.empty_graph_us = 5.0

    def run() -> None:
        gpu.kernel(12.0, on=gpu.default)
        gpu.stream.wait_stream(gpu.default)

    timing = timed(gpu, run)
    assert timing.timer == "cuda_event"
    assert timing.latency_us == pytest.approx(12.0, rel=0.1)


@pytest.mark.parametrize(
    ("name", "gcn", "told", "real"),
    [
        ("NVIDIA H100 80GB HBM3", "", 50 * MIB, 50 * MIB),
        ("NVIDIA B200", "", 126 * MIB, 126 * MIB),
        ("AMD Instinct MI300X", "gfx942:sramecc+:xnack-", 4 * MIB, 256 * MIB),
        ("AMD Instinct MI355X", "gfx950", 4 * MIB, 256 * MIB),
        ("AMD Radeon RX 7900 XTX", "gfx1100", 6 * MIB, 96 * MIB),
        ("AMD Radeon of tomorrow", "gfx1999", 8 * MIB, 256 * MIB),
    ],
)
def test_cold_is_cold(monkeypatch: pytest.MonkeyPatch, name: str, gcn: str, told: int, real: int) -> None:
    gpu = ModelGPU(name=name, gcn=gcn, l2_bytes=told, cache_bytes=real).install(monkeypatch.setattr)
    size = 3 * MIB
    miss_us = size / gpu.dram_gbps / 1e3

    def run() -> None:
        gpu.kernel(2.0, reads=("operand", size))

    warm, cold = (timed(gpu, run, cache).latency_us for cache in ("warm", "cold"))
    assert warm == pytest.approx(2.0, rel=0.05)
    assert cold == pytest.approx(2.0 + miss_us, rel=0.2)


def test_the_cache_of_amd_s_older_cards_is_their_l2() -> None:
    assert last_level_bytes(SimpleNamespace(L2_cache_size=8 * MIB, gcnArchName="gfx90a:sramecc+")) == 8 * MIB
    assert last_level_bytes(SimpleNamespace(L2_cache_size=50 * MIB)) == 50 * MIB


def test_the_cache_of_an_nvidia_gpu_is_its_l2_although_torch_gives_its_name_as_a_target() -> None:
    """torch 2.11 for CUDA says ``gcnArchName="NVIDIA H200"``: 60 MiB became 256, and no H200 was a known one."""
    told = SimpleNamespace(L2_cache_size=60 * MIB, gcnArchName="NVIDIA H200")
    assert last_level_bytes(told) == 60 * MIB
    assert seen_device_id("NVIDIA H200", 132, 139.8, last_level_bytes(told) / MIB) == "h200_sxm"


def test_a_failed_capture_is_measured_eagerly_and_noted(gpu: ModelGPU) -> None:
    def run() -> None:
        gpu.kernel(12.0)
        torch.cuda.synchronize()

    timing = timed(gpu, run)
    assert timing.timer == "cuda_event"
    assert cuda_timer.FAILED_CAPTURES == ["CUDA error: operation not permitted when stream is capturing"]


# --- what says beforehand that it cannot be captured ---------------------------------------------------

GROUPED = make_op("grouped_gemm", experts=4, tokens=32, n=16, k=16)
MOE = make_op("fused_moe", tokens=9, hidden=16, inter=32, topk=2, experts=8)


@pytest.mark.parametrize(
    ("capability", "holds"), [((8, 0), False), ((8, 9), False), ((9, 0), True), ((10, 0), True), ((12, 0), False)]
)
def test_grouped_products_are_captured_where_they_are_one_kernel(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], holds: bool
) -> None:
    ModelGPU(capability=capability).install(monkeypatch.setattr)
    assert BUILDERS["grouped_gemm", "torch"].capturable(GROUPED) is holds
    assert BUILDERS["fused_moe", "torch"].capturable(MOE) is holds
    assert BUILDERS["grouped_gemm", "loop"].capturable(GROUPED)


@pytest.mark.parametrize(
    ("size", "direction", "holds"), [(4, "d2h", False), (8, "d2h", True), (4, "h2d", True), (4, "d2d", True)]
)
def test_a_number_that_python_waits_for_is_not_captured(size: int, direction: str, holds: bool) -> None:
    op = make_op("copy", "fp32", size_bytes=size, direction=direction)
    assert BUILDERS["copy", "torch"].capturable(op) is holds


def test_autograd_s_passes_are_not_captured() -> None:
    for key in (("attention_backward", "math"), ("rms_norm_backward", "autograd")):
        assert not BUILDERS[key].capturable(OP)


def test_a_mask_chooses_between_numbers_on_the_device() -> None:
    """Numbers in the host's memory would be copied there by every call, which no capture permits."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class OnCuda(Inputs):
        def __init__(self) -> None:
            self.device, self.seed, self.bytes = "cuda", 0, 0

        def normal(self, *shape: int, dtype: str) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.bool, device="cuda")

    seen: list[set[str]] = []

    class Devices(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "where" in str(func):
                seen.append({each.device.type for each in args if isinstance(each, torch.Tensor)})
            return func(*args, **(kwargs or {}))

    with FakeTensorMode(allow_non_fake_inputs=True):
        run = BUILDERS["elementwise", "torch"].build(make_op("elementwise", "bool", "fp32", numel=50), OnCuda())
        with Devices():
            run()
    assert seen == [{"cuda"}]


# --- refusals ------------------------------------------------------------------------------------------


def triton_error(name: str) -> Exception:
    return type(name, (Exception,), {"__module__": "triton.compiler.errors"})("type fp8e4nv not supported in this arch")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0"),
        triton_error("CompilationError"),
        triton_error("OutOfResources"),
        NotImplementedError("no kernel"),
        RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED"),
    ],
)
def test_a_refusal_is_unsupported(error: Exception) -> None:
    with pytest.raises(Unsupported, match=str(error)[:12]), refusals():
        raise error


@pytest.mark.parametrize("error", [triton_error("InterpreterError"), KeyError("a bug"), RuntimeError("CUDA error: x")])
def test_what_breaks_is_no_refusal(error: Exception) -> None:
    with pytest.raises(type(error)), refusals():
        raise error


# --- clocks --------------------------------------------------------------------------------------------


@dataclass
class Reader:
    """Clocks whose reading takes as long as NVML's on a busy host."""

    gpu: ModelGPU
    slow_until_us: float = 0.0
    readings: int = 0
    throttled: bool = False

    def __call__(self) -> Reader:
        self.readings += 1
        self.gpu.host_us += 5 * 5000.0
        self.throttled = self.gpu.host_us < self.slow_until_us
        return self


def run_for(gpu: ModelGPU, us: float) -> Callable[[int], list[float]]:
    def take(count: int) -> list[float]:
        gpu.host_us += count * us
        return [us] * count

    return take


def test_clocks_are_asked_for_twenty_times_a_second_at_most(gpu: ModelGPU) -> None:
    reader = Reader(gpu)
    found = collect(run_for(gpu, 1000.0), lambda samples: False, 10**9, reader, gpu.now_ns, batch=10)
    assert reader.readings <= 1e9 / CLOCKS_EVERY_NS + 2
    busy_us = 1000.0 * len(found.values)
    assert busy_us > 0.6e6, "most of the second goes into samples"


def test_samples_since_the_last_reading_are_discarded_when_it_finds_a_slow_clock(gpu: ModelGPU) -> None:
    reader = Reader(gpu, slow_until_us=200_000.0)
    found = collect(
        run_for(gpu, 1000.0), MedianWidth(0.5, minimum=60), 10**10, reader, gpu.now_ns, lambda s: None, batch=10
    )
    assert not found.throttled
    assert found.discarded > 10
    assert len(found.values) >= 60


def test_a_slow_moment_longer_than_the_budget_is_waited_out(gpu: ModelGPU) -> None:
    """0.3 s of heat, and 0.15 s for the case: rests are not on the budget."""
    reader = Reader(gpu, slow_until_us=300_000.0)

    def rest(seconds: float) -> None:
        gpu.host_us += 1e6 * seconds

    found = collect(run_for(gpu, 1000.0), MedianWidth(0.01), 150_000_000, reader, gpu.now_ns, rest, batch=10)
    assert not found.throttled
    assert len(found.values) >= 10
    reader = Reader(gpu, slow_until_us=1e12)
    always = collect(
        run_for(gpu, 1000.0), MedianWidth(0.01), gpu.now_ns() + 150_000_000, reader, gpu.now_ns, rest, batch=10
    )
    assert always.throttled
    assert reader.readings >= 8


def test_a_row_is_of_one_clock_and_says_which(gpu: ModelGPU) -> None:
    """A limiter that takes hold after 40 ms: batches before it, with rests; where it always holds, none from before."""
    gpu.capped = 0.8

    def run() -> None:
        gpu.kernel(1000.0)

    boost = timed(gpu, run, budget_s=0.15)
    assert (boost.latency_us, boost.latency_p90_us) == pytest.approx((1000.0, 1000.0), rel=0.01)
    assert (boost.clocks, boost.sm_clock_mhz) == ("burst", pytest.approx(3500.0, rel=0.02))
    assert boost.discarded > 0
    gpu.settles_us = 5_000.0  # sooner than a batch ends
    held = timed(gpu, run, budget_s=0.15)
    assert (held.latency_us, held.latency_p10_us) == pytest.approx((1250.0, 1250.0), rel=0.01)
    assert (held.clocks, held.sm_clock_mhz) == ("steady", pytest.approx(2800.0, rel=0.02))
    gpu.capped = 1.0
    assert timed(gpu, run).clocks == "burst"


@pytest.mark.parametrize(("kernels", "fits"), [(200, True), (900, True), (2000, False), (5000, False)])
def test_more_kernels_than_the_queue_holds_are_not_timed_as_the_hosts_time(
    gpu: ModelGPU, kernels: int, fits: bool
) -> None:
    gpu.launch_us = 5.0

    def run() -> None:
        for _ in range(kernels):
            gpu.kernel(4.0)

    if fits:
        assert timed(gpu, run, capturable=False).latency_us == pytest.approx(4.0 * kernels, rel=0.05)
        return
    with pytest.raises(Unsupported, match="more than the device's queue holds"):
        timed(gpu, run, capturable=False)


def test_the_overhead_of_events_follows_the_device(gpu: ModelGPU, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is measured anew every minute, under way, and stands in the row."""
    seconds = [1000.0]
    monkeypatch.setattr(cuda_timer, "time", SimpleNamespace(monotonic=lambda: seconds[0]))

    def run() -> None:
        gpu.kernel(20.0)

    first = timed(gpu, run, "cold")
    assert first.event_overhead_us == pytest.approx(gpu.empty_graph_us + gpu.mark_us, abs=0.2)
    gpu.empty_graph_us += 2.0
    seconds[0] += 30.0
    assert timed(gpu, run, "cold").event_overhead_us == first.event_overhead_us
    seconds[0] += 31.0
    later = timed(gpu, run, "cold")
    assert later.event_overhead_us == pytest.approx(first.event_overhead_us + 2.0, abs=0.1)
    assert later.latency_us == pytest.approx(first.latency_us, rel=0.02)


@pytest.mark.parametrize(("target", "cycles"), [("gfx1100", 100.0), ("gfx942:sramecc+", 3500.0), ("", 3500.0)])
def test_rdna_counts_a_fixed_clock(gpu: ModelGPU, target: str, cycles: float) -> None:
    torch.cuda.get_device_properties(0).gcnArchName = target
    cuda_timer.cycles_per_us.cache_clear()
    assert cuda_timer.cycles_per_us(0) == cycles
    cuda_timer.cycles_per_us.cache_clear()


# --- collectives ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("device_us", [10.0, 30.0, 400.0])
def test_a_collective_takes_the_device_s_time_not_python_s(gpu: ModelGPU, device_us: float) -> None:
    """25 us of Python to issue what takes the device 10."""
    gpu.launch_us = 0.0

    def call() -> None:
        gpu.host_us += 25.0
        gpu.kernel(device_us)

    call()
    block = collective_timer.make_block(call, "cuda", lambda: None, gpu.now_ns)
    assert block(20) == pytest.approx(device_us, rel=0.02)


def test_ranks_that_come_late_do_not_count(gpu: ModelGPU) -> None:
    """The first call of a block waits for the slowest rank."""
    waits = iter([900.0])

    def call() -> None:
        gpu.kernel(10.0 + next(waits, 0.0) * late)

    late = 0
    for _ in range(3):
        call()
    block = collective_timer.make_block(call, "cuda", lambda: None, gpu.now_ns)
    late, waits = 1, iter([900.0])
    assert block(10) == pytest.approx(10.0, rel=0.05)


def test_a_builder_without_words_is_captured() -> None:
    assert Builder(lambda op, inputs: lambda: None, ("cuda",), lambda op, device: True).capturable(OP)
