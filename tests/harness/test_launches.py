"""How many operators the builders call for one op, counted: what says which rows are of eager forms."""

from __future__ import annotations

from typing import Any

import pytest

from opcast.datasets.launches import OPERATORS, operators
from opcast.datasets.ops import KINDS, make_op
from opcast.harness.cases import BUILDERS, prepare
from opcast.harness.plan import build_plan

torch = pytest.importorskip("torch")
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

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
    assert (len(found) > 1) == (operators(kind, backend) > 1), found


def test_what_is_declared_is_a_way_to_run_an_op() -> None:
    assert set(OPERATORS) <= set(BUILDERS)
    assert all(count > 1 for count in OPERATORS.values())


@pytest.mark.parametrize(("device", "backend"), [("cuda", "inductor"), ("cpu", "torch")])
def test_the_usual_backend_is_one_kernel_where_the_machine_has_one(device: str, backend: str) -> None:
    """Of the shapes of a model, too: a form of several kernels would answer for eager stacks alone."""
    op = {"kind": "rope", "tokens": 64, "heads": 8, "head_dim": 128, "dtype": "bf16"}
    plan = build_plan({"name": "one", "settings": {"device": device}, "ops": [op], "cache": "warm"})
    assert [each.backend for each in plan.cases] == [backend]
