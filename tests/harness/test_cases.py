"""Every case against a float64 reference on the same inputs, and how its inputs lie in memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opcast.datasets.ops import KINDS, Op, make_op

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from opcast.harness.cases import BUILDERS, Inputs, Unsupported, attention, backends, prepare  # noqa: E402
from opcast.harness.cases.base import COLD_CACHES, MOST_SETS, cache_bytes, torch_dtype  # noqa: E402
from opcast.harness.cases.gemm import expert_ends, expert_tokens  # noqa: E402
from opcast.harness.cases.moe import expert_shares  # noqa: E402
from opcast.harness.cases.rows import EPSILON, LARGEST  # noqa: E402

ATTENTION = {"heads_q": 4, "heads_kv": 2, "head_dim": 16, "v_head_dim": 16}
OPS = {
    "gemm": [{"m": 12, "n": 8, "k": 16, "layout": layout} for layout in ("nn", "nt", "tn")]
    + [{"batch": 3, "m": 12, "n": 8, "k": 16, "layout": layout} for layout in ("nn", "nt", "tn")],
    "grouped_gemm": [
        {"experts": 4, "tokens": 32, "n": 16, "k": 8, "imbalance": 250, "layout": layout}
        for layout in ("nn", "nt", "tn")
    ],
    "attention_prefill": [
        {**ATTENTION, "seq_q": 24, "seq_kv": 24},
        {**ATTENTION, "seq_q": 24, "seq_kv": 24, "causal": "no"},
        {**ATTENTION, "seq_q": 8, "seq_kv": 24},
        {**ATTENTION, "seq_q": 24, "seq_kv": 24, "window": 5, "heads_kv": 4},
        {**ATTENTION, "seq_q": 24, "seq_kv": 24, "head_dim": 24, "heads_kv": 4},
    ],
    "attention_decode": [
        {**ATTENTION, "batch": 3, "seq_q": 1, "seq_kv": 40},
        {**ATTENTION, "seq_q": 1, "seq_kv": 40, "window": 7},
    ],
    "attention_backward": [
        {**ATTENTION, "seq_q": 24, "seq_kv": 24, "heads_kv": 4},
        {**ATTENTION, "seq_q": 24, "seq_kv": 24},
        {**ATTENTION, "seq_q": 24, "seq_kv": 24, "window": 5, "heads_kv": 4},
        {**ATTENTION, "seq_q": 24, "seq_kv": 24, "head_dim": 24, "heads_kv": 4},
    ],
    "mla_prefill": [{"heads": 2, "seq_q": 16, "seq_kv": 16}],
    "mla_decode": [{"heads": 2, "seq_q": 1, "seq_kv": 20}, {"batch": 2, "heads": 3, "seq_q": 3, "seq_kv": 20}],
    "rope": [{"tokens": 6, "heads": 5, "head_dim": 16}],
    "elementwise": [
        {"numel": 60, "inputs": 1},
        {"numel": 60, "inputs": 2},
        {"numel": 60, "inputs": 3, "run": 12},
        {"numel": 60, "inputs": 1, "fn": "division"},
        {"numel": 60, "inputs": 2, "fn": "division", "run": 5},
        {"numel": 60, "inputs": 3, "fn": "division"},
        {"numel": 60, "inputs": 1, "fn": "exponential"},
        {"numel": 60, "inputs": 2, "fn": "exponential"},
        {"numel": 60, "inputs": 1, "fn": "cast", "run": 20},
        {"numel": 60, "inputs": 0, "fn": "fill"},
    ],
    "reduce": [{"outer": 5, "length": 7, "inner": 3}],
    "embedding": [{"tokens": 9, "vocab": 11, "hidden": 4}],
    "embedding_backward": [{"tokens": 9, "vocab": 11, "hidden": 4}],
    "cross_entropy": [{"tokens": 6, "vocab": 13}],
    "cross_entropy_backward": [{"tokens": 6, "vocab": 13}],
    "moe_route": [{"tokens": 6, "experts": 8, "topk": 3, **extra} for extra in ({}, {"kernels": "topk"})],
    "moe_permute": [
        {"tokens": 6, "hidden": 4, "topk": 3, "direction": "permute"},
        {"tokens": 6, "hidden": 4, "topk": 3, "direction": "unpermute"},
    ],
    "fused_moe": [
        {"tokens": 9, "hidden": 16, "inter": 24, "topk": 2, "experts": 8, **extra}
        for extra in ({}, {"gated": "no"}, {"skew": 120}, {"ep": 2, "tp": 3}, {"ep": 8, "skew": 200})
    ],
    "adamw": [{"numel": 100, "tensors": 3}],
    "copy": [
        {"size_bytes": 480},
        {"size_bytes": 480, "run_bytes": 48},
        {"size_bytes": 480, "run_bytes": 48, "joins": 1},
        {"size_bytes": 480, "run_bytes": 48, "joins": 2},
    ],
    "host_overhead": [
        *({"what": what, "calls": 3} for what in ("launch", "dispatch", "view", "module", "autograd")),
        {"what": "operator", "calls": 40},
    ],
}
ROWS = [{"rows": 6, "cols": 20}]


class Recording(Inputs):
    """Inputs that keep a copy of what they made, in order."""

    def __init__(self, device: str, seed: int) -> None:
        super().__init__(device, seed)
        self.made: list[torch.Tensor] = []

    def _count(self, tensor: torch.Tensor) -> torch.Tensor:
        self.made.append(tensor.clone())
        return super()._count(tensor)


def small_ops(kind: str, dtype: str) -> list[Op]:
    if kind == "quantize":
        shapes = [
            {"rows": 6, "cols": 32, "block": block, "out_dtype": out} for block in (0, 8) for out in ("int8", "fp8")
        ]
    else:
        shapes = OPS.get(kind, ROWS)
    return [make_op(kind, dtype, **shape) for shape in shapes]


# --- references in float64 -----------------------------------------------------------------------------


def swap(x: torch.Tensor, when: bool) -> torch.Tensor:
    return x.transpose(-2, -1) if when else x


def reference_gemm(op: Op, a, b):
    return swap(a, op.layout == 2) @ swap(b, op.layout == 1)


def reference_grouped(op: Op, a, b, ends: list[int]):
    spans = list(zip([0, *ends[:-1]], ends, strict=True))
    if op.layout == 2:
        return torch.stack([a[s:e].T @ b[s:e] for s, e in spans])
    return torch.cat([a[s:e] @ swap(b[i], op.layout == 1) for i, (s, e) in enumerate(spans)])


def attend(q, k, v, causal: bool, window: int, scale: float):
    """softmax(q kᵀ scale) v on [batch, heads, seq, dim], the mask spelled out pair by pair."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(-2, -1) * scale
    offset = k.shape[2] - q.shape[2]
    for i in range(q.shape[2]):
        for j in range(k.shape[2]):
            if causal and (j > i + offset or (window and j <= i + offset - window)):
                scores[:, :, i, j] = -math.inf
    return torch.softmax(scores, -1) @ v


def reference_attention(op: Op, q, k, v):
    def heads_first(x, heads):
        return x if x.shape[1] == heads and x.shape[2] != heads else x.transpose(1, 2)

    q = q.transpose(1, 2)
    k, v = (x if op.kind == "attention_decode" else x.transpose(1, 2) for x in (k, v))
    return attend(q, k, v, bool(op.causal), op.window, 1 / math.sqrt(op.head_dim))


def gradients(function, operands, dy):
    operands = [x.clone().requires_grad_() for x in operands]
    return torch.autograd.grad(function(*operands), operands, dy)


def reference_attention_backward(op: Op, q, k, v, dy):
    q, k, v, dy = (x.transpose(1, 2) for x in (q, k, v, dy))
    scale = 1 / math.sqrt(op.head_dim)
    return gradients(lambda *qkv: attend(*qkv, bool(op.causal), op.window, scale), (q, k, v), dy)


def reference_flash(op: Op, *made):
    """FlashAttention's own layout: everything is [batch, seq, heads, dim], V as wide as K."""
    q, k, v, *dy = (x.transpose(1, 2) for x in made)
    causal, window, scale = bool(op.causal), getattr(op, "window", 0), 1 / math.sqrt(q.shape[-1])
    if dy:
        return [
            x.transpose(1, 2) for x in gradients(lambda *qkv: attend(*qkv, causal, window, scale), (q, k, v), dy[0])
        ]
    return attend(q, k, v, causal, window, scale).transpose(1, 2)


def reference_mla_prefill(op: Op, q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return attend(q, k, v, True, 0, 1 / math.sqrt(op.qk_nope_head_dim + op.qk_rope_head_dim))


def reference_mla_decode(op: Op, q, latent):
    heads_first = q.view(op.batch, op.seq_q, op.heads, -1).transpose(1, 2)
    keys = latent[:, None]
    scale = 1 / math.sqrt(op.qk_nope_head_dim + op.qk_rope_head_dim)
    out = attend(heads_first, keys, keys[..., : op.kv_lora_rank], bool(op.causal), 0, scale)
    return out.transpose(1, 2).reshape(op.batch, op.seq_q * op.heads, -1)


def rms(x, w):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPSILON) * w


def norm(x, w, b):
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + EPSILON) * w + b


def gelu(x):
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def gate(x):
    a, b = x.chunk(2, -1)
    return a / (1 + torch.exp(-a)) * b


def silu_mul_gradients(x, dy):
    return gradients(gate, (x,), dy)[0].chunk(2, -1)


def rotate(op: Op, x, angles):
    a, b = x.chunk(2, -1)
    cos, sin = angles.view(op.tokens, 1, -1).cos(), angles.view(op.tokens, 1, -1).sin()
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def reference_elementwise(op: Op, *xs):
    xs = [x[:, : op.run] if op.run else x for x in xs]
    if op.fn == 4:
        return torch.ones(op.numel)
    if op.fn == 1:
        xs = [x.abs() + 0.5 for x in xs]
    functions = {
        (0, 1): lambda x: x * 1.7,
        (0, 2): lambda x, y: x * y,
        (0, 3): lambda x, y, z: x + y * z,
        (1, 1): lambda x: 1 / torch.sqrt(x),
        (1, 2): lambda x, y: x / y,
        (1, 3): lambda x, y, z: x + y / z,
        (2, 1): lambda x: x / (1 + torch.exp(-x)),
        (2, 2): lambda dy, x: gradients(lambda x: x / (1 + torch.exp(-x)), (x,), dy)[0],
        (3, 1): lambda x: x,
    }
    return functions[op.fn, op.inputs](*xs)


def scatter_rows(op: Op, dy, indices):
    out = torch.zeros(op.vocab, op.hidden, dtype=torch.float64)
    for row, index in enumerate(indices.long().tolist()):
        out[index] += dy[row]
    return out


def nll(x, targets):
    return -torch.log_softmax(x, -1)[torch.arange(len(targets)), targets].mean()


def reference_fused_moe(op: Op, noise, x, up, down):
    """Token by token, expert by expert."""
    shares = torch.tensor(expert_shares(op, 7), dtype=torch.float64)
    uniform = 0.5 * (1 + torch.erf(noise / math.sqrt(2)))
    scores = torch.log(shares) - torch.log(-torch.log(uniform))
    weights, chosen = route(op, scores)
    out = torch.zeros_like(x)
    for token in range(op.tokens):
        for weight, expert in zip(weights[token], chosen[token].tolist(), strict=True):
            if expert < op.experts // op.ep:
                inner = up[expert] @ x[token]
                inner = gate(inner) if op.gated else inner / (1 + torch.exp(-inner))
                out[token] += weight * (down[expert] @ inner)
    return out


def route(op: Op, scores):
    weights, chosen = torch.topk(torch.softmax(scores, -1), op.topk, dim=-1)
    return weights / weights.sum(-1, keepdim=True), chosen


def permute(op: Op, *made):
    if op.direction == 0:
        x, order = made
        return torch.stack([x[int(i) // op.topk] for i in order])
    rows, weights, order = made
    weighted = torch.stack([rows[int(i)] * weights[int(i)] for i in order])
    return torch.stack([weighted[t * op.topk : (t + 1) * op.topk].sum(0) for t in range(op.tokens)])


def without_gaps(x: torch.Tensor) -> torch.Tensor:
    """The runs of what :meth:`Inputs.runs` made: every second one, of a single run all."""
    return x[:, : x.shape[1] // 2] if x.dim() == 2 else x[None]


REFERENCES = {
    "gemm": reference_gemm,
    "attention_prefill": reference_attention,
    "attention_decode": reference_attention,
    "attention_backward": reference_attention_backward,
    "mla_prefill": reference_mla_prefill,
    "mla_decode": reference_mla_decode,
    "rms_norm": lambda op, w, x: rms(x, w),
    "rms_norm_backward": lambda op, x, w, dy: gradients(rms, (x, w), dy),
    "layer_norm": lambda op, w, b, x: norm(x, w, b),
    "layer_norm_backward": lambda op, w, b, x, dy: gradients(norm, (x, w, b), dy),
    "softmax": lambda op, x: torch.exp(x) / torch.exp(x).sum(-1, keepdim=True),
    "softmax_backward": lambda op, x, dy: gradients(lambda x: torch.softmax(x, -1), (x,), dy)[0],
    "silu_mul": lambda op, x: gate(x),
    "silu_mul_backward": lambda op, x, dy: silu_mul_gradients(x, dy),
    "gelu": lambda op, x: gelu(x),
    "gelu_backward": lambda op, dy, x: gradients(gelu, (x,), dy)[0],
    "rope": rotate,
    "elementwise": reference_elementwise,
    "reduce": lambda op, x: x.sum(1),
    "embedding": lambda op, table, indices: table[indices.long()],
    "embedding_backward": scatter_rows,
    "cross_entropy": lambda op, x, targets: nll(x, targets.long()),
    "cross_entropy_backward": lambda op, x, targets: gradients(lambda x: nll(x, targets.long()), (x,), None)[0],
    "moe_route": lambda op, scores: torch.topk(scores, op.topk) if op.kernels else route(op, scores),
    "moe_permute": permute,
    "fused_moe": reference_fused_moe,
    "copy": lambda op, *parts: torch.cat([without_gaps(x) for x in parts]) if op.run_bytes else parts[0],
}
SPECIAL = {"grouped_gemm", "quantize", "adamw", "host_overhead", "host_pass"}
SPECIAL |= {
    kind for kind in KINDS if kind.startswith(("linear_attention", "causal_conv1d", "sparse_"))
}  # test_mixers.py
TOLERANCE = {"fp32": 2e-5, "bf16": 3e-2, "fp16": 4e-3}


def distance(out: torch.Tensor, expected: torch.Tensor) -> float:
    """‖out − expected‖ / ‖expected‖; nan when either has one."""
    out, expected = out.detach().cpu().double(), expected.detach().double()
    assert out.shape == expected.shape
    return float((out - expected).norm() / expected.norm().clamp_min(1e-30))


def as_double(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x.cpu().double() for x in tensors]


def run_case(op: Op, backend: str, device: str = "cpu"):
    """What one call returns, float64 copies of the inputs it had, and the kernel that it chose."""
    inputs = Recording(device, 7)
    run = BUILDERS[op.kind, backend].build(op, inputs)
    with torch.no_grad():
        out = run()
    return out, as_double(inputs.made), inputs.kernel


def check(op: Op, backend: str, device: str = "cpu") -> None:
    out, made, kernel = run_case(op, backend, device)
    expected = (reference_flash if "flash2" in (backend, kernel) else REFERENCES[op.kind])(op, *made)
    outs = out if isinstance(out, (tuple, list)) else (out,)
    wanted = expected if isinstance(expected, (tuple, list)) else (expected,)
    dtype = (
        torch.bool if op.out_dtype == "bool" else getattr(torch, {"fp32": "float32", "bf16": "bfloat16"}[op.out_dtype])
    )
    assert outs[0].dtype == dtype
    for got, want in zip(outs, wanted, strict=False):
        assert distance(got, want) < TOLERANCE[op.dtype]


CLAIMS = [(kind, backend) for (kind, backend), builder in BUILDERS.items() if "cpu" in builder.devices]


def test_every_kind_but_collectives_has_a_case_on_both_devices():
    for device in ("cpu", "cuda"):
        covered = {kind for (kind, _), builder in BUILDERS.items() if device in builder.devices}
        assert covered == {name for name, kind in KINDS.items() if not kind.collective}


@pytest.mark.parametrize(("kind", "backend"), [claim for claim in CLAIMS if claim[0] not in SPECIAL])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_result_equals_the_reference(kind: str, backend: str, dtype: str):
    for op in small_ops(kind, dtype):
        if backend in backends(op, "cpu"):
            check(op, backend)


@pytest.mark.parametrize("backend", ["torch", "loop"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_grouped_product_equals_one_product_for_each_expert(backend: str, dtype: str):
    for op in small_ops("grouped_gemm", dtype):
        out, (a, b), _ = run_case(op, backend)
        assert distance(out, reference_grouped(op, a, b, expert_ends(op, 7))) < TOLERANCE[dtype]


@pytest.mark.parametrize("skew", [0, 101, 120, 100])
def test_expert_shares_put_the_busiest_rank_first(skew: int):
    op = make_op("fused_moe", tokens=1000, hidden=8, inter=8, topk=2, experts=32, ep=4, skew=skew)
    shares = expert_shares(op, 3)
    ranks = [sum(shares[i : i + 8]) for i in range(0, 32, 8)]
    assert sum(shares) == pytest.approx(1.0)
    assert ranks[0] == max(ranks)
    assert (max(shares) > 5 / 32) == (skew > 0)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_quantized_values_and_scales(dtype: str):
    for op in small_ops("quantize", dtype):
        (q, scales), (x,), _ = run_case(op, "torch")
        block = op.block or op.cols
        maxima = x.view(op.rows, -1, block).abs().amax(-1)
        assert distance(scales, maxima / LARGEST[op.out_dtype]) < TOLERANCE[dtype]
        back = q.double().view(op.rows, -1, block) * scales.double()[..., None]
        step = 1 / 127 if op.out_dtype == "int8" else 2**-3
        assert ((back - x.view(back.shape)).abs() <= step * maxima[..., None]).all()


@pytest.mark.parametrize("backend", ["torch", "foreach", "loop"])
def test_adamw_updates_every_tensor_by_the_published_rule(backend: str):
    op = make_op("adamw", "fp32", numel=100, tensors=3)
    inputs = Recording("cpu", 3)
    run = BUILDERS["adamw", backend].build(op, inputs)
    run()
    values, slopes = inputs.made[0::2], inputs.made[1::2]
    assert [x.numel() for x in values] == [34, 33, 33]
    updated = run.func.__self__.param_groups[0]["params"]
    for value, slope, got in zip(values, slopes, updated, strict=True):
        x, g = value.double(), slope.double()
        m, v = torch.zeros_like(x), torch.zeros_like(x)
        for step in (1, 2):
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            x = x - 1e-3 * 0.01 * x
            x = x - 1e-3 * (m / (1 - 0.9**step)) / (torch.sqrt(v / (1 - 0.999**step)) + 1e-8)
        assert distance(got, x) < 1e-6


def test_int8_product_is_exact():
    op = make_op("gemm", "int8", out_dtype="int32", m=24, n=16, k=32, layout="nt")
    out, (a, b), _ = run_case(op, "torch")
    assert out.dtype == torch.int32
    assert torch.equal(out.double(), a @ b.T)


@pytest.mark.parametrize(
    ("dtype", "out", "dims", "expected"),
    [
        ("fp32", "bool", {"inputs": 2}, lambda x, y: x > y),
        ("fp32", "bool", {"inputs": 1}, lambda x: x > 1.7),
        ("bool", "bool", {"inputs": 2}, lambda x, y: x.bool() & y.bool()),
        ("bool", "bool", {"inputs": 1}, lambda x: ~x.bool()),
        ("bool", "fp32", {"inputs": 1}, lambda x: torch.where(x.bool(), 1.7, -1.7)),
        ("bool", "int64", {"inputs": 1}, lambda x: x.cumsum(-1)),
        ("int64", "int64", {"inputs": 1}, lambda x: x + 1),
        ("int64", "int64", {"inputs": 1, "fn": "division"}, lambda x: (x / 3).floor()),
        ("int64", "int64", {"inputs": 2, "fn": "division"}, lambda x, y: (x / y).floor()),
    ],
)
def test_elementwise_on_other_numbers(dtype: str, out: str, dims: dict[str, object], expected):
    got, made, _ = run_case(make_op("elementwise", dtype, out, numel=50, **dims), "torch")
    assert got.dtype == torch_dtype(out)
    assert distance(got, expected(*made)) < 1e-6


def test_one_element_to_the_host_is_read_as_a_number():
    out, (x,), _ = run_case(make_op("copy", "fp32", size_bytes=4, direction="d2h"), "torch")
    assert out == float(x)


def test_softmax_and_cast_write_the_asked_dtype():
    out, _, _ = run_case(make_op("softmax", "bf16", "fp32", rows=3, cols=8), "torch")
    assert out.dtype == torch.float32
    out, _, _ = run_case(make_op("elementwise", "fp32", "bf16", numel=64, fn="cast"), "torch")
    assert out.dtype == torch.bfloat16


# --- how inputs lie ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "strides"), [("nn", ((16, 1), (8, 1))), ("nt", ((16, 1), (1, 16))), ("tn", ((1, 12), (8, 1)))]
)
def test_gemm_operands_are_stored_as_the_layout_says(layout, strides):
    run = BUILDERS["gemm", "torch"].build(make_op("gemm", "fp32", m=12, n=8, k=16, layout=layout), Inputs("cpu", 0))
    assert tuple(x.stride() for x in run.args) == strides


def test_elementwise_operands_are_contiguous_for_the_asked_run():
    run = BUILDERS["elementwise", "torch"].build(
        make_op("elementwise", "fp32", numel=60, inputs=2, run=12), Inputs("cpu", 0)
    )
    assert [x.stride() for x in run.args] == [(24, 1), (24, 1)]
    assert [x.shape for x in run.args] == [(5, 12), (5, 12)]
    assert run().is_contiguous()


@given(st.integers(1, 70), st.integers(1, 500), st.integers(100, 900))
def test_expert_tokens_realise_the_imbalance_to_the_token(experts: int, tokens: int, imbalance: int):
    if imbalance > 100 * experts:
        with pytest.raises(Unsupported):
            expert_tokens(experts, tokens, imbalance)
        return
    counts = expert_tokens(experts, tokens, imbalance)
    assert sum(counts) == tokens
    assert len(counts) == experts
    assert counts[0] == max(counts)
    assert min(counts) >= 0
    assert abs(counts[0] - tokens / experts * imbalance / 100) < 1
    assert len(counts) == 1 or max(counts[1:]) - min(counts[1:]) <= 1


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "int8", "int64"])
def test_random_inputs_are_not_zero_and_follow_the_seed(dtype: str):
    first, again, other = (Inputs("cpu", seed).normal(5_000_000, dtype=dtype) for seed in (1, 1, 2))
    assert torch.count_nonzero(first) > 0.999 * first.numel()
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_inputs_count_their_bytes():
    inputs = Inputs("cpu", 0)
    inputs.normal(10, 3, dtype="bf16")
    inputs.integers(5, high=9)
    assert inputs.bytes == 60 + 40


# --- rotation ------------------------------------------------------------------------------------------


def test_rotation_has_distinct_inputs_that_leave_the_cache():
    prepared = prepare(make_op("elementwise", "fp32", numel=1 << 20, inputs=2), "torch", "cpu")
    pointers = {run.args[0].data_ptr() for run in prepared.rotate}
    assert len(pointers) == len(prepared.rotate) == -(-COLD_CACHES * cache_bytes("cpu") // prepared.bytes_needed)
    assert prepared.rotation_is_cold


def test_small_ops_have_a_bounded_rotation_and_large_ones_none():
    small = prepare(make_op("elementwise", "fp32", numel=64), "torch", "cpu")
    assert len(small.rotate) == MOST_SETS
    assert not small.rotation_is_cold
    numel = COLD_CACHES * cache_bytes("cpu") // 8 + 1
    large = prepare(make_op("elementwise", "fp32", numel=numel), "torch", "cpu")
    assert large.rotate == (large.run,)


# --- refusals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "backend", "why"),
    [
        (make_op("gemm", "fp32", m=4, n=4, k=4), "cublas", "it has torch"),
        (make_op("gemm", "bf16", "fp32", m=4, n=4, k=4), "torch", "not into fp32"),
        (make_op("gemm", "fp8", "bf16", m=16, n=16, k=16), "torch", "emulated"),
        (make_op("gemm", "int8", m=16, n=16, k=16), "torch", "out_dtype=int32"),
        (make_op("gemm", "nvfp4", "bf16", m=16, n=16, k=16), "torch", "emulated"),
        (make_op("gemm", "mxfp4", "bf16", m=16, n=16, k=16), "torch", "no plain tensors of mxfp4"),
        (
            make_op("attention_prefill", heads_q=3, heads_kv=2, head_dim=8, v_head_dim=8, seq_q=4, seq_kv=4),
            "sdpa",
            "evenly",
        ),
        (
            make_op("attention_prefill", heads_q=2, heads_kv=2, head_dim=8, v_head_dim=8, seq_q=4, seq_kv=2),
            "sdpa",
            "last of",
        ),
        (make_op("elementwise", "fp32", numel=60, run=7), "torch", "runs of 7"),
        (make_op("elementwise", "fp32", numel=60, inputs=4), "torch", "reads 4 tensors"),
        (make_op("softmax", "fp8", rows=4, cols=8), "torch", "not implemented"),
        (make_op("quantize", "fp32", "int8", rows=4, cols=10, block=4), "torch", "blocks of 4"),
        (make_op("rms_norm", "bf16", "fp32", rows=4, cols=8), "torch", "not in fp32"),
        (make_op("copy", size_bytes=64, direction="h2d"), "torch", "one memory"),
        (make_op("adamw", "fp32", numel=2, tensors=3), "torch", "cannot be spread"),
        (make_op("moe_route", tokens=2, experts=2, topk=3), "torch", "top 3 of 2"),
    ],
)
def test_what_cannot_run_is_refused_with_the_reason(op: Op, backend: str, why: str):
    with pytest.raises(Unsupported, match=why):
        prepare(op, backend, "cpu")


def test_a_misspelt_backend_is_answered_with_the_nearest():
    with pytest.raises(Unsupported, match="did you mean sdpa"):
        prepare(small_ops("attention_decode", "fp32")[0], "sdp", "cpu")


def test_a_refusal_while_inputs_are_made_is_one_too():
    with pytest.raises(Unsupported, match="not implemented"):
        prepare(make_op("softmax_backward", "fp8", rows=4, cols=8), "torch", "cpu")


def test_more_than_the_memory_is_refused_before_it_is_taken():
    with pytest.raises(torch.OutOfMemoryError, match="GiB available"):
        prepare(make_op("elementwise", "fp32", numel=1 << 42), "torch", "cpu")


# --- CUDA's operators, as far as a machine without a GPU can tell --------------------------------------


class Shapes(Inputs):
    """Inputs on a GPU that need not be there: under FakeTensorMode torch computes shapes and checks arguments."""

    def __init__(self) -> None:
        self.device, self.seed, self.bytes, self.kernel = "cuda", 0, 0, None

    @property
    def capability(self) -> tuple[int, int]:
        return 9, 0

    def another(self) -> Shapes:
        return Shapes()

    def normal(self, *shape: int, dtype: str) -> torch.Tensor:
        return torch.empty(shape, dtype=torch_dtype(dtype), device="cuda")

    def integers(self, *shape: int, high: int, dtype: str = "int64") -> torch.Tensor:
        return torch.empty(shape, dtype=torch_dtype(dtype), device="cuda")


HEADS = {**ATTENTION, "heads_kv": 4, "seq_q": 24, "seq_kv": 24}
LATENT = {"heads": 2, "seq_q": 16, "seq_kv": 16}
SCALED = {"m": 256, "n": 256, "k": 512}
FUSED = ("flash2", "cudnn", "efficient")
ON_CUDA = [
    *(("attention_prefill", backend, HEADS) for backend in FUSED),
    *(("attention_backward", backend, HEADS) for backend in FUSED),
    *(("attention_decode", backend, {**HEADS, "seq_q": 1}) for backend in FUSED),
    *(("mla_prefill", backend, LATENT) for backend in FUSED),
    ("attention_prefill", "flash2", {**HEADS, "window": 5}),
    ("attention_prefill", "flash2", {**HEADS, "seq_q": 8}),
    ("attention_backward", "flash2", {**HEADS, "window": 5, "heads_kv": 2}),
    *(("gemm", "cublas", {"m": 32, "n": 32, "k": 32, "layout": layout}) for layout in ("nn", "nt", "tn")),
    *(("gemm", "cublas", {**SCALED, "dtype": dtype}) for dtype in ("fp8", "fp8_e5m2", "fp8_block")),
    ("gemm", "rowwise", {**SCALED, "dtype": "fp8"}),
    ("gemm", "cublas", {"m": 32, "n": 32, "k": 32, "dtype": "int8", "out_dtype": "int32"}),
    ("gemm", "cublas", {"m": 32, "n": 32, "k": 32, "out_dtype": "fp32"}),
    *(
        ("grouped_gemm", "torch", {"experts": 4, "tokens": 32, "n": 16, "k": 8, "layout": x})
        for x in ("nn", "nt", "tn")
    ),
    ("gemm", "cublas", {**SCALED, "dtype": "mxfp8"}),
    ("gemm", "cublas", {**SCALED, "dtype": "nvfp4"}),
    ("gemm", "tinygemm", {**SCALED, "dtype": "w4a16"}),
    ("grouped_gemm", "torch", {"experts": 4, "tokens": 32, "n": 32, "k": 64, "dtype": "fp8"}),
    ("rms_norm_backward", "torch", {"rows": 6, "cols": 20}),
    ("layer_norm_backward", "torch", {"rows": 6, "cols": 20}),
]


@pytest.mark.parametrize(("kind", "backend", "shape"), ON_CUDA)
def test_cuda_operators_take_the_arguments_they_are_given(kind: str, backend: str, shape: dict[str, object]):
    dtype = shape.get("dtype", "bf16")
    out = shape.get("out_dtype", "bf16")
    op = make_op(kind, dtype, out, **{k: v for k, v in shape.items() if k not in ("dtype", "out_dtype")})
    assert backend in backends(op, "cuda")
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        try:
            result = BUILDERS[kind, backend].build(op, Shapes())()
        except Unsupported as reason:
            pytest.skip(str(reason))
    first = result[0] if isinstance(result, tuple) else result
    assert first.device.type == "cuda"
    assert first.dtype == torch_dtype(out)


@pytest.mark.parametrize(
    ("chosen", "operator"),
    [
        ("flash", "aten._flash_attention_backward"),
        ("cudnn", "aten._scaled_dot_product_cudnn_attention_backward"),
        ("efficient", "aten._scaled_dot_product_efficient_attention_backward"),
    ],
)
def test_attention_s_backward_is_that_of_the_kernel_which_torch_picks(
    chosen: str, operator: str, monkeypatch: pytest.MonkeyPatch
):
    """On Hopper and Blackwell torch picks cuDNN for training, and not the FlashAttention-2 that it picks elsewhere."""
    asked: list[bool] = []

    def picked(operands: Sequence[Any], arguments: dict[str, Any], inputs: Inputs) -> str:
        asked.append(all(operand.requires_grad for operand in operands))
        return chosen

    monkeypatch.setattr(attention, "picked", picked)
    inputs = Shapes()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        run: Any = BUILDERS["attention_backward", "sdpa"].build(make_op("attention_backward", **HEADS), inputs)
    assert asked == [True]
    assert inputs.kernel == chosen
    assert str(run.func) == operator


# --- on a GPU ------------------------------------------------------------------------------------------

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
GPU_CLAIMS = [(kind, backend) for (kind, backend), builder in BUILDERS.items() if "cuda" in builder.devices]


def aligned(op: Op) -> Op:
    """The op in sizes that tensor cores take."""
    wider = {"gemm": ("m", "n", "k"), "grouped_gemm": ("n", "k"), "attention_prefill": ("head_dim", "v_head_dim")}
    return op.replace(**{name: 16 * -(-getattr(op, name) // 16) for name in wider.get(op.kind, ())})


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("kind", "backend"), [claim for claim in GPU_CLAIMS if claim[0] not in SPECIAL])
def test_result_on_the_gpu_equals_the_reference(kind: str, backend: str):
    ran = 0
    for op in map(aligned, small_ops(kind, "bf16")):
        if backend not in backends(op, "cuda"):
            continue
        try:
            prepare(op, backend, "cuda")
        except Unsupported:
            continue
        check(op, backend, "cuda")
        ran += 1
    if not ran:
        pytest.skip(f"{kind} has no bf16 shape that {backend} takes on this GPU")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("backend", ["torch", "loop"])
def test_grouped_product_on_the_gpu_equals_one_product_for_each_expert(backend: str):
    for op in small_ops("grouped_gemm", "bf16"):
        out, (a, b), _ = run_case(op, backend, "cuda")
        assert distance(out, reference_grouped(op, a, b, expert_ends(op, 7))) < TOLERANCE["bf16"]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_copies_between_host_and_gpu_use_pinned_memory_and_arrive(direction: str):
    run = BUILDERS["copy", "torch"].build(make_op("copy", size_bytes=1 << 20, direction=direction), Inputs("cuda", 0))
    (source,) = run.args
    copied = run()
    torch.cuda.synchronize()
    assert torch.equal(copied.cpu(), source.cpu())
    assert (source if direction == "h2d" else copied).is_pinned()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("dtype", "out", "backend"),
    [
        ("fp8", "bf16", "cublas"),
        ("fp8", "bf16", "rowwise"),
        ("fp8_e5m2", "bf16", "cublas"),
        ("fp8_block", "bf16", "cublas"),
    ],
)
def test_scaled_products_run_where_the_gpu_has_them(dtype: str, out: str, backend: str):
    op = make_op("gemm", dtype, out, m=256, n=256, k=512)
    try:
        prepared = prepare(op, backend, "cuda")
    except Unsupported as reason:
        pytest.skip(str(reason))
    with prepared.context():
        result = prepared.run()
    assert result.shape == (256, 256)
    assert torch.isfinite(result.float()).all()
