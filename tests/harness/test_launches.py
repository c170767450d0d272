"""Which builders run operators one by one, counted, and that whoever is said to launch a kernel names one there is."""

from __future__ import annotations

from typing import Any

import pytest

from opcast.datasets.backends import means
from opcast.datasets.kernels import BACKENDS, is_eager
from opcast.datasets.launches import FRAMEWORKS
from opcast.datasets.ops import KINDS, make_op
from opcast.harness.cases import BUILDERS, prepare
from opcast.harness.plan import build_plan

torch = pytest.importorskip("torch")
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from opcast.harness.collective_variants import ON_GPU  # noqa: E402

SIZES = {
    **dict.fromkeys(("tokens", "rows", "heads", "heads_q", "heads_kv", "groups", "outer", "inner"), 8),
    **dict.fromkeys(("hidden", "inter", "cols", "vocab", "numel", "m", "n", "k", "length", "channels"), 64),
    **dict.fromkeys(("head_dim", "v_head_dim", "state_dim", "width"), 16),
    **dict.fromkeys(("seq_q", "seq_kv", "seq"), 64),
    "experts": 4,
    "topk": 2,
    "batch": 1,
    "numel": 1024,
}
FREE = """empty empty_like empty_strided new_empty view _unsafe_view reshape t transpose permute expand slice select
detach alias as_strided unsqueeze squeeze split split_with_sizes chunk unbind lift_fresh _local_scalar_dense
_foreach_add_
_record_function_enter_new _record_function_exit scalar_tensor""".split()
# One kernel on a GPU, where torch fuses them; on a CPU it composes them.
COMPOSED_ON_CPU = {
    ("rms_norm", "torch"),
    ("rms_norm_backward", "torch"),
    ("mla_prefill", "sdpa"),
    ("moe_permute", "torch"),
}


class Calls(TorchDispatchMode):
    """Operators that do something, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        if name not in FREE:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def calls_of(kind: str, backend: str) -> list[str]:
    dims = {dim.name: SIZES[dim.name] for dim in KINDS[kind].dims if dim.name in SIZES and not dim.choices}
    if kind.endswith("decode") and "seq_q" in dims:
        dims["seq_q"] = 1
    op = make_op(kind, "bf16", **dims, **({"out_dtype": "fp8"} if kind == "quantize" else {}))
    ready = prepare(op, backend, "cpu")
    with ready.context(), Calls() as calls:
        ready.run()
    return calls.names


ON_CPU = sorted(
    key
    for key, builder in BUILDERS.items()
    if "cpu" in builder.devices and KINDS[key[0]].family not in ("host", "copy")
)


@pytest.mark.parametrize(("kind", "backend"), [key for key in ON_CPU if key not in COMPOSED_ON_CPU])
def test_forms_of_several_operators_are_declared(kind: str, backend: str) -> None:
    found = calls_of(kind, backend)
    assert (len(found) > 1) == is_eager(kind, backend), found


def test_what_is_declared_is_a_way_to_run_an_op() -> None:
    declared = [
        (kind, name, count)
        for name, row in BACKENDS.items()
        for table in (row.kernels, row.eager)
        for kind, count in table.items()
    ]
    assert len(declared) > 40
    assert all((kind, name) in BUILDERS and count > 1 for kind, name, count in declared)
    assert not any(row.kernels.keys() & row.eager.keys() for row in BACKENDS.values())


def test_whose_kernels_frameworks_launch_are_the_harness_s() -> None:
    """A framework's own name stands for rows of it that others measured."""
    known = {backend for _, backend in BUILDERS} | set(ON_GPU)
    for framework, row in FRAMEWORKS.items():
        by_chip = (row.attention, row.experts, row.sums)
        lists = (row.packages, row.blocks, row.nearest, *(each for table in by_chip for each in table.values()))
        for name in {name for each in lists for name in each} - {framework}:
            assert any(means(name, backend) for backend in known), name


@pytest.mark.parametrize(("device", "backend"), [("cuda", "inductor"), ("cpu", "torch")])
def test_the_usual_backend_is_one_kernel_where_the_machine_has_one(device: str, backend: str) -> None:
    """Of the shapes of a model, too: a form of several kernels would answer for eager stacks alone."""
    op = {"kind": "rope", "tokens": 64, "heads": 8, "head_dim": 128, "dtype": "bf16"}
    plan = build_plan({"name": "one", "settings": {"device": device}, "ops": [op], "cache": "warm"})
    assert [each.backend for each in plan.cases] == [backend]
