"""Operators of a real step: how long each takes on a modelled GPU, and which node of the simulated one it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from opcast.jobs.operator_match import match_operators, plain_name  # noqa: E402
from opcast.jobs.operator_times import recorder, time_operators  # noqa: E402

from ..harness.stream_model import ModelGPU  # noqa: E402

# --- how long ------------------------------------------------------------------------------------------


class OnModel(TorchDispatchMode):
    """Every operator is one kernel on the model, whose launch takes the host longer than the kernel lasts."""

    def __init__(self, gpu: ModelGPU, durations: dict[str, float]) -> None:
        super().__init__()
        self.gpu, self.durations = gpu, durations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for name, us in self.durations.items():
            if f".{name}." in str(func):
                self.gpu.kernel(us)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("launch_us", [12.0, 900.0])
def test_a_kernel_s_time_is_without_its_launch(monkeypatch: pytest.MonkeyPatch, launch_us: float) -> None:
    gpu = ModelGPU(launch_us=launch_us).install(monkeypatch.setattr)
    monkeypatch.setattr("opcast.jobs.operator_times._on_device.__defaults__", (gpu.now_ns,))
    x = torch.zeros(4, 4)
    kernels = {"add": 2.0, "mm": 40.0, "mul": 2.0}

    def step() -> None:
        (x + x).mm(x).mul(x).view(16)

    with OnModel(gpu, kernels):
        found = time_operators(step, "cuda", 3, gpu.wait)
    assert found["names"] == ["aten.add.Tensor", "aten.mm.default", "aten.mul.Tensor", "aten.view.default"]
    assert found["us"] == pytest.approx([2.0, 40.0, 2.0, 0.1], abs=0.05)


def test_a_host_s_operators_are_timed_on_its_clock() -> None:
    x, y = torch.zeros(4), torch.zeros(1 << 20)
    found = time_operators(lambda: (x + x, y + y), "cpu", 3, lambda: None)
    assert found["names"] == ["aten.add.Tensor"] * 2
    assert found["us"][1] > found["us"][0] >= 0.1


def test_a_recorder_hands_every_call_on() -> None:
    seen: list[str] = []

    def around(name: str, call: Callable[[], Any]) -> Any:
        seen.append(name)
        return call()

    with recorder(around):
        assert torch.equal(torch.ones(2) + 1, torch.full((2,), 2.0))
    assert "aten.add.Tensor" in seen


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
def test_on_a_gpu_a_short_operator_takes_less_than_its_launch() -> None:
    x = torch.ones(16, device="cuda")
    found = time_operators(lambda: x + x, "cuda", 5, torch.cuda.synchronize)
    assert 0.3 < found["us"][0] < 5


# --- which ---------------------------------------------------------------------------------------------

TRACED = "aten._scaled_dot_product_flash_attention_for_cpu.default"
FORWARD = (
    TRACED,
    "opcast.attention.default",
    "opcast::attention",
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
    "aten._scaled_dot_product_fused_attention_overrideable.default",
    "aten._scaled_dot_product_attention_math.default",
    "aten._flash_attention_forward.default",
)
BACKWARD = (
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default",
    "opcast.attention_backward.default",
    "aten._scaled_dot_product_flash_attention_backward.default",
    "aten._scaled_dot_product_efficient_attention_backward.default",
    "aten._scaled_dot_product_cudnn_attention_backward.default",
    "aten._scaled_dot_product_fused_attention_overrideable_backward.default",
    "aten._flash_attention_backward.default",
)


def test_attention_has_one_name_whatever_kernel_runs() -> None:
    assert {plain_name(each) for each in FORWARD} == {"attention"}
    assert {plain_name(each) for each in BACKWARD} == {"attention_backward"}
    assert plain_name("aten.add_.Tensor") == plain_name("aten.add.Scalar") == "add"
    assert plain_name("aten._foreach_add_.List") == "foreach_add"


def layer(attention: str) -> list[str]:
    return ["aten.rms_norm.default", "aten.mm.default", attention, "aten.mm.default", "aten.add.Tensor"]


@pytest.mark.parametrize("kernel", FORWARD)
def test_the_comparison_goes_on_behind_attention(kernel: str) -> None:
    nodes = layer(TRACED) * 28
    calls = [name for each in layer(kernel) * 28 for name in (each, "aten.view.default")]
    pairs = list(match_operators(nodes, calls))
    assert pairs == [(place, 2 * place) for place in range(len(nodes))]


def test_what_one_of_the_two_lacks_costs_itself_alone() -> None:
    nodes = [*layer(TRACED), "aten.gelu.default", *layer(TRACED)]
    calls = ["aten.t.default", *layer(FORWARD[3])[:3], "aten.copy_.default", *layer(FORWARD[3])[3:], *layer(FORWARD[3])]
    pairs = list(match_operators(nodes, calls))
    assert [place for place, _ in pairs] == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10]
    assert all(plain_name(nodes[a]) == plain_name(calls[b]) for a, b in pairs)
    assert pairs == sorted(pairs)


def test_a_step_without_attention_of_its_own_still_lines_up() -> None:
    """Attention in pieces, as torch's math path runs it: the layers around it are compared."""
    pieces = ["aten.bmm.default", "aten._softmax.default", "aten.bmm.default"]
    nodes = layer(TRACED) * 4
    calls = [name for each in layer(TRACED) * 4 for name in (pieces if each == TRACED else [each])]
    assert len(list(match_operators(nodes, calls))) == 4 * 4


def test_tracing_has_the_attention_that_the_device_has() -> None:
    from opcast.jobs.quickstart import traced_on
    from opcast.simulator.trace import Workload

    workloads = {"train": Workload("train")}
    assert traced_on(workloads, "cpu")["train"].attention == "sdpa"
    assert traced_on(workloads, "cuda")["train"].attention == "fused"
