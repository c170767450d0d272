"""Kernels of other packages, against stand-ins for the packages: what they are told is what the op says.

A stand-in takes the arguments that the package documents, unpacks pages, windows and masks by itself, and computes
attention pair by pair in float64. The pairs that it computes are counted: they must be those whose FLOPs the op claims.
"""

from __future__ import annotations

import itertools
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from opcast.datasets.ops import KINDS, Op, attended_pairs, make_op  # noqa: E402
from opcast.harness.cases import BUILDERS, Inputs, Unsupported, backends, prepare  # noqa: E402
from opcast.harness.cases.packages import EXTRAS  # noqa: E402
from opcast.harness.cases.served import padded_experts  # noqa: E402

Pages = tuple[Any, Any]
BF16 = {"heads_q": 4, "heads_kv": 2, "head_dim": 16, "v_head_dim": 16}
PREFILL = [
    {**BF16, "batch": 2, "seq_q": 24, "seq_kv": 24},
    {**BF16, "seq_q": 24, "seq_kv": 24, "causal": "no"},
    {**BF16, "seq_q": 8, "seq_kv": 40},
    {**BF16, "batch": 3, "seq_q": 40, "seq_kv": 40, "window": 7},
]
DECODE = [
    {**BF16, "batch": 3, "seq_q": 1, "seq_kv": 40},
    {**BF16, "batch": 2, "seq_q": 4, "seq_kv": 300},
    {**BF16, "batch": 2, "seq_q": 1, "seq_kv": 300, "window": 33},
    {**BF16, "batch": 1, "seq_q": 1, "seq_kv": 16},
]


class Oracle:
    """Attention of one sequence at a time, and how many pairs of query and key of one head it came to."""

    def __init__(self) -> None:
        self.pairs = 0

    def attend(self, q: Any, k: Any, v: Any, causal: bool, left: int, right: int) -> Any:
        """[queries, heads, dim] over [keys, heads, dim]; masks aligned with the last key."""
        n, m = len(q), len(k)
        i, j = np.arange(n)[:, None] + (m - n), np.arange(m)[None, :]
        seen = (j <= i) if causal else np.ones((n, m), dtype=bool)
        seen &= (left < 0) | (j >= i - left)
        seen &= (right < 0) | (j <= i + right)
        self.pairs += int(seen.sum())
        groups = q.shape[1] // k.shape[1]
        q, k, v = (
            x.double().transpose(0, 1) for x in (q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1))
        )
        scores = (q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])).masked_fill(~torch.tensor(seen), -math.inf)
        return (torch.softmax(scores, -1) @ v).transpose(0, 1).bfloat16()

    def unpaged(self, cache: Any, table: Any, length: int) -> Any:
        """The first ``length`` tokens of a sequence, from its pages [pages, page, heads, dim]."""
        assert table.dtype == torch.int32
        return cache[table.long()].flatten(0, 1)[:length]


def flash_attention(oracle: Oracle, table_name: str) -> ModuleType:
    """flash_attn and flash_attn_interface: the latter calls the table of pages ``page_table``."""

    def flash_attn_func(q: Any, k: Any, v: Any, causal: bool = False, window_size: Pages = (-1, -1)) -> Any:
        return torch.stack([oracle.attend(*qkv, causal, *window_size) for qkv in zip(q, k, v, strict=True)])

    def flash_attn_with_kvcache(
        q: Any, k_cache: Any, v_cache: Any, *, cache_seqlens: Any, causal: bool, window_size: Pages, **table: Any
    ) -> Any:
        assert list(table) == [table_name]
        assert k_cache.shape[1] % 256 == 0, "FlashAttention 2 wants pages of 256"
        rows = zip(q, table[table_name], cache_seqlens.tolist(), strict=True)
        return torch.stack(
            [
                oracle.attend(x, oracle.unpaged(k_cache, t, n), oracle.unpaged(v_cache, t, n), causal, *window_size)
                for x, t, n in rows
            ]
        )

    module = ModuleType("stand_in")
    module.flash_attn_func, module.flash_attn_with_kvcache = flash_attn_func, flash_attn_with_kvcache
    return module


def flashinfer(oracle: Oracle) -> ModuleType:
    """Both wrappers of pages: planned first, then run."""

    class Wrapper:
        def __init__(self, workspace: Any, kv_layout: str = "NHD", **graph: Any) -> None:
            assert workspace.dtype == torch.uint8
            assert graph.pop("use_cuda_graph", None) == graph.pop("use_tensor_cores", None) == (True if graph else None)
            assert kv_layout == "NHD"

        def run(self, q: Any, paged_kv_cache: Pages) -> Any:
            assert (q.dtype, paged_kv_cache[0].dtype) == self.dtypes
            assert q.shape[1:] == (self.heads[0], self.heads[2])
            assert paged_kv_cache[0].shape[1:] == (self.heads[3], self.heads[1], self.heads[2])
            found = []
            for i, last in enumerate(self.last.tolist()):
                table = self.indices[self.kv_starts[i] : self.kv_starts[i + 1]]
                length = (len(table) - 1) * self.heads[3] + last
                k, v = (oracle.unpaged(cache.float(), table, length) for cache in paged_kv_cache)
                x = q[self.q_starts[i] : self.q_starts[i + 1]]
                found.append(oracle.attend(x, k, v, self.causal, self.left, -1))
            return torch.cat(found)

        def keep(self, starts: Any, indices: Any, last: Any, heads: Any, left: int, dtypes: Any) -> None:
            self.kv_starts, self.indices, self.last, self.heads = starts.tolist(), indices, last, heads
            self.left, self.dtypes = left, dtypes

    class Decode(Wrapper):
        def plan(
            self,
            indptr: Any,
            indices: Any,
            last_page_len: Any,
            num_qo_heads: int,
            num_kv_heads: int,
            head_dim: int,
            page_size: int,
            *,
            window_left: int,
            q_data_type: Any,
            kv_data_type: Any,
        ) -> None:
            heads = (num_qo_heads, num_kv_heads, head_dim, page_size)
            self.keep(indptr, indices, last_page_len, heads, window_left, (q_data_type, kv_data_type))
            self.causal, self.q_starts = False, list(range(len(self.kv_starts)))

    class Prefill(Wrapper):
        def plan(
            self,
            qo_indptr: Any,
            paged_kv_indptr: Any,
            paged_kv_indices: Any,
            paged_kv_last_page_len: Any,
            num_qo_heads: int,
            num_kv_heads: int,
            head_dim_qk: int,
            page_size: int,
            *,
            causal: bool,
            window_left: int,
            q_data_type: Any,
            kv_data_type: Any,
        ) -> None:
            heads = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
            dtypes = (q_data_type, kv_data_type)
            self.keep(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, heads, window_left, dtypes)
            self.causal, self.q_starts = causal, qo_indptr.tolist()

    module = ModuleType("flashinfer")
    module.BatchDecodeWithPagedKVCacheWrapper, module.BatchPrefillWithPagedKVCacheWrapper = Decode, Prefill
    return module


def vllm_flash_attn(oracle: Oracle) -> ModuleType:
    """vLLM's build: sequences one after the other, cache in pages."""

    def flash_attn_varlen_func(
        q: Any,
        k: Any,
        v: Any,
        max_seqlen_q: int,
        cu_seqlens_q: Any,
        max_seqlen_k: int,
        *,
        seqused_k: Any,
        block_table: Any,
        causal: bool,
        window_size: list[int],
        fa_version: int,
        scheduler_metadata: Any,
        num_splits: int,
    ) -> Any:
        assert fa_version == 3
        assert scheduler_metadata["num_splits"] == num_splits
        starts = cu_seqlens_q.tolist()
        assert max_seqlen_q == max(b - a for a, b in itertools.pairwise(starts))
        assert max_seqlen_k == int(seqused_k.max())
        return torch.cat(
            [
                oracle.attend(
                    q[starts[i] : starts[i + 1]], oracle.unpaged(k, t, n), oracle.unpaged(v, t, n), causal, *window_size
                )
                for i, (t, n) in enumerate(zip(block_table, seqused_k.tolist(), strict=True))
            ]
        )

    module = ModuleType("vllm.vllm_flash_attn")
    module.flash_attn_varlen_func = flash_attn_varlen_func
    module.get_scheduler_metadata = lambda **asked: asked
    return module


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch) -> Oracle:
    """Stand-ins for all packages, on an H100 that is not there."""
    made = Oracle()
    monkeypatch.setitem(sys.modules, "flash_attn", flash_attention(made, "block_table"))
    monkeypatch.setitem(sys.modules, "flash_attn_interface", flash_attention(made, "page_table"))
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer(made))
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn", vllm_flash_attn(made))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    return made


WAYS = ("flash_attn:2", "flash_attn:3", "flashinfer:paged", "vllm:paged")


@pytest.mark.usefixtures("oracle")
@pytest.mark.parametrize("backend", WAYS)
@pytest.mark.parametrize(
    ("kind", "shape"),
    [("attention_prefill", shape) for shape in PREFILL] + [("attention_decode", shape) for shape in DECODE],
)
def test_a_serving_kernel_computes_the_pairs_that_the_op_claims(
    oracle: Oracle, backend: str, kind: str, shape: dict[str, Any]
) -> None:
    op = make_op(kind, "bf16", **shape)
    assert backend in backends(op, "cuda")
    inputs = Inputs("cpu", 3)
    out = BUILDERS[kind, backend].build(op, inputs)()
    assert out.numel() == op.batch * op.seq_q * op.heads_q * op.head_dim
    assert torch.isfinite(out.float()).all()
    assert out.float().abs().sum() > 0
    assert oracle.pairs == op.batch * int(attended_pairs(op.seq_q, op.seq_kv, op.causal, op.window))
    assert inputs.kernel.startswith(backend.split(":")[0])


@pytest.mark.usefixtures("oracle")
def test_a_cache_in_fp8_is_read_as_fp8_or_refused() -> None:
    op = make_op("attention_decode", "bf16", **DECODE[0], kv_dtype="fp8")
    assert BUILDERS["attention_decode", "flashinfer:paged"].build(op, Inputs("cpu", 3))().dtype == torch.bfloat16
    for backend in ("sdpa", "flash2", "flash_attn:2"):
        with pytest.raises(Unsupported, match="kv_dtype=same"):
            BUILDERS["attention_decode", backend].build(op, Inputs("cpu", 3))


@pytest.mark.usefixtures("oracle")
@pytest.mark.parametrize("backend", ["flash_attn:2", "flash_attn:3"])
def test_gradients_come_from_the_package_s_own_pass(backend: str) -> None:
    op = make_op("attention_backward", "bf16", **PREFILL[3])
    found = BUILDERS["attention_backward", backend].build(op, Inputs("cpu", 3))()
    assert [tuple(each.shape) for each in found] == [(3, 40, 4, 16), (3, 40, 2, 16), (3, 40, 2, 16)]
    assert not BUILDERS["attention_backward", backend].capturable(op)


@pytest.mark.parametrize(("name", "words"), EXTRAS.items())
def test_a_package_that_is_missing_is_one_line_with_the_way_to_it(
    monkeypatch: pytest.MonkeyPatch, name: str, words: str
) -> None:
    from opcast.harness.cases.packages import package

    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(Unsupported) as caught:
        package(f"{name}.part")
    assert str(caught.value).endswith(words)
    assert "\n" not in str(caught.value)


def test_every_backend_of_a_package_says_so_where_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in EXTRAS:
        monkeypatch.setitem(sys.modules, name, None)
    ops = {
        "attention_prefill": make_op("attention_prefill", **PREFILL[0]),
        "attention_decode": make_op("attention_decode", **DECODE[0]),
        "attention_backward": make_op("attention_backward", **PREFILL[0]),
        "rms_norm": make_op("rms_norm", rows=2, cols=8),
        "silu_mul": make_op("silu_mul", rows=2, cols=8),
        "rope": make_op("rope", tokens=2, heads=2, head_dim=8),
        "quantize": make_op("quantize", "bf16", "fp8", rows=2, cols=128),
        "grouped_gemm": make_op("grouped_gemm", "fp8_block", experts=2, tokens=8, n=128, k=128),
        "fused_moe": make_op("fused_moe", tokens=8, hidden=64, inter=64, topk=2, experts=4),
    }
    latent = {"heads": 2, "seq_q": 1, "seq_kv": 64}
    ops |= {
        "mla_decode": make_op("mla_decode", **latent),
        "mla_prefill": make_op("mla_prefill", **latent),
        "moe_route": make_op("moe_route", "fp32", tokens=2, experts=4, topk=2),
        "rms_norm_backward": make_op("rms_norm_backward", rows=2, cols=8),
        "silu_mul_backward": make_op("silu_mul_backward", rows=2, cols=8),
    }
    formats = {
        "fused_moe": ("bf16", "mxfp4a16", "nvfp4"),
        "grouped_gemm": ("bf16",),
        "gemm": ("fp8", "fp8_block", "w4a16", "bf16"),
    }
    scan = {"heads": 2, "groups": 2, "head_dim": 64, "state_dim": 64}
    ops |= {
        "linear_attention_prefill": make_op("linear_attention_prefill", seq=8, **scan),
        "linear_attention_backward": make_op("linear_attention_backward", seq=8, **scan),
        "linear_attention_decode": make_op("linear_attention_decode", **scan),
        "causal_conv1d": make_op("causal_conv1d", rows=8, cols=64),
        "causal_conv1d_backward": make_op("causal_conv1d_backward", rows=8, cols=64),
    }
    asked = 0
    for (kind, backend), builder in BUILDERS.items():
        if backend.partition(":")[0] not in EXTRAS and not backend.startswith("flash_attn"):
            continue
        op = ops.get(kind) or make_op("gemm", m=8, n=128, k=128)
        rounded = [op.replace(out_dtype=each) for each in ("fp8", "fp8_block", "nvfp4")] if kind == "quantize" else []
        others = [
            make_op(kind, each, "bf16", **dict(zip(KINDS[kind].names, op.dims, strict=True)))
            for each in formats.get(kind, ())
        ]
        op = next((each for each in (op, *others, *rounded) if builder.accepts(each, "cuda")), op)
        if op.out_dtype in ("fp8_block", "nvfp4"):
            op = op.replace(block={"fp8_block": 128, "nvfp4": 16}[op.out_dtype], cols=128)
        if backend == "transformer_engine:quantize":
            op = op.replace(rows=16)
        assert builder.devices == ("cuda",)
        with pytest.raises(Unsupported, match="is not installed"):
            builder.build(op, Inputs("cpu", 0))
        asked += 1
    assert asked >= 45


# --- rows, products, experts ---------------------------------------------------------------------------


def test_vllm_s_kernels_are_given_what_they_document(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def heard(name: str) -> Any:
        return lambda *given, **more: seen.append((name, given, more))

    names = ("rms_norm", "rotary_embedding", "scaled_fp8_quant", "cutlass_scaled_mm")
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm._custom_ops", SimpleNamespace(**{name: heard(name) for name in names}))

    def given(kind: str, backend: str, op: Op) -> tuple[tuple[Any, ...], dict[str, Any]]:
        BUILDERS[kind, f"vllm:{backend}"].build(op, Inputs("cpu", 1))()
        name, arguments, more = seen.pop()
        assert name == backend
        return arguments, more

    (out, x, weight, _), _ = given("rms_norm", "rms_norm", make_op("rms_norm", rows=6, cols=20))
    assert (out.shape, x.shape, weight.shape) == ((6, 20), (6, 20), (20,))
    assert out.data_ptr() != x.data_ptr()
    rope = make_op("rope", tokens=5, heads=3, head_dim=8)
    (positions, query, key, dim, table, neox), _ = given("rope", "rotary_embedding", rope)
    assert (positions.tolist(), query.shape, key, dim, neox) == ([0, 1, 2, 3, 4], (5, 24), None, 8, True)
    assert table.shape == (5, 8)
    (rows,), more = given("quantize", "scaled_fp8_quant", make_op("quantize", "bf16", "fp8", rows=4, cols=32))
    assert (rows.shape, more) == ((4, 32), {"use_per_token_if_dynamic": True})
    product = make_op("gemm", "fp8", "bf16", m=16, n=32, k=64)
    (a, b, scale_a, scale_b, dtype), _ = given("gemm", "cutlass_scaled_mm", product)
    assert (a.shape, b.shape, b.stride(), dtype) == ((16, 64), (64, 32), (1, 64), torch.bfloat16)
    assert (scale_a.shape, scale_b.shape) == ((16, 1), (1, 32))


@pytest.mark.parametrize("ends", [[3, 3, 131, 140], [128], [0, 5]])
def test_each_expert_s_rows_fill_whole_tiles(ends: list[int]) -> None:
    rows = padded_experts(ends, 128)
    assert len(rows) % 128 == 0
    counts = np.diff([0, *ends])
    for expert, count in enumerate(counts):
        assert rows.count(expert) == count
    for start in range(0, len(rows), 128):
        assert len(set(rows[start : start + 128]) - {-1}) == 1, "a tile is of one expert"


def test_deep_gemm_is_given_scales_for_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    stand_in = SimpleNamespace(
        get_m_alignment_for_contiguous_layout=lambda: 128,
        m_grouped_fp8_gemm_nt_contiguous=lambda *given: seen.append(given),
        fp8_gemm_nt=lambda *given: seen.append(given),
        transform_sf_into_required_layout=lambda sf, **_: sf,
    )
    monkeypatch.setitem(sys.modules, "deep_gemm", stand_in)
    grouped = make_op("grouped_gemm", "fp8_block", experts=3, tokens=300, n=192, k=256)
    BUILDERS["grouped_gemm", "deep_gemm:fp8"].build(grouped, Inputs("cpu", 0))()
    (a, scale_a), (b, scale_b), out, experts = seen.pop()
    assert a.shape == (len(experts), 256)
    assert scale_a.shape == (len(experts), 2)
    assert b.shape == (3, 192, 256)
    assert scale_b.shape == (3, 2, 2)
    assert out.shape == (len(experts), 192)
    plain = make_op("gemm", "fp8_block", m=100, n=192, k=256)
    BUILDERS["gemm", "deep_gemm:fp8"].build(plain, Inputs("cpu", 0))()
    (a, scale_a), (b, scale_b), out = seen.pop()
    assert (scale_a.shape, scale_b.shape, out.shape) == ((100, 2), (2, 2), (100, 192))


class DeepEpBuffer:
    """deep_ep.Buffer as it is documented: what a rank sends, it gets back, twice over."""

    def __init__(
        self,
        group: Any,
        nvl: int = 0,
        rdma: int = 0,
        low_latency_mode: bool = False,
        explicitly_destroy: bool = False,
        **queues: int,
    ) -> None:
        assert low_latency_mode == bool(queues)
        assert explicitly_destroy
        assert (nvl > 0) != low_latency_mode
        self.calls: list[tuple[str, Any]] = []

    @staticmethod
    def get_low_latency_rdma_size_hint(tokens: int, hidden: int, ranks: int, experts: int) -> int:
        return tokens * hidden * ranks * experts

    def clean_low_latency_buffer(self, tokens: int, hidden: int, experts: int) -> None:
        self.calls.append(("clean", tokens))

    def destroy(self) -> None:
        self.calls.append(("destroy", None))

    def get_dispatch_layout(self, topk_idx: Any, num_experts: int) -> tuple[Any, ...]:
        assert topk_idx.dtype == torch.int64
        assert int(topk_idx.max()) < num_experts
        return "per rank", "per node", "per expert", "inside", None

    def dispatch(self, x: Any, handle: Any = None, **layout: Any) -> tuple[Any, ...]:
        names = {"topk_idx", "topk_weights", "num_tokens_per_rank", "num_tokens_per_rdma_rank", "is_token_in_rank"}
        assert set(layout) == (set() if handle else {*names, "num_tokens_per_expert"})
        self.calls.append(("dispatch", handle))
        return torch.cat((x, x)), None, None, [], "handle", None

    def combine(self, x: Any, handle: Any) -> None:
        self.calls.append(("combine", handle))

    def low_latency_dispatch(self, x: Any, topk_idx: Any, most: int, experts: int, use_fp8: bool) -> tuple[Any, ...]:
        assert len(x) <= most
        self.calls.append(("low_latency_dispatch", use_fp8))
        return torch.cat((x, x)), None, "handle", None, None

    def low_latency_combine(self, x: Any, topk_idx: Any, topk_weights: Any, handle: Any) -> None:
        assert topk_weights.dtype == torch.float32
        self.calls.append(("low_latency_combine", handle))


@pytest.mark.parametrize(
    ("kind", "mode", "timed"),
    [
        ("ep_dispatch", "normal", ("dispatch", "handle")),
        ("ep_combine", "normal", ("combine", "handle")),
        ("ep_dispatch", "low_latency", ("low_latency_dispatch", False)),
        ("ep_combine", "low_latency", ("low_latency_combine", "handle")),
    ],
)
def test_deep_ep_exchanges_tokens_by_a_layout_made_once(
    monkeypatch: pytest.MonkeyPatch, kind: str, mode: str, timed: tuple[str, Any]
) -> None:
    from opcast.harness import deep_ep_calls
    from opcast.harness.collective_calls import CallSetting

    made: list[DeepEpBuffer] = []

    class Kept(DeepEpBuffer):
        def __init__(self, *given: Any, **more: Any) -> None:
            super().__init__(*given, **more)
            made.append(self)

    monkeypatch.setitem(sys.modules, "deep_ep", SimpleNamespace(Buffer=Kept))
    monkeypatch.setattr(deep_ep_calls, "BUFFERS", deep_ep_calls.SharedBuffer())
    op = make_op(kind, "bf16", tokens=16, hidden=64, topk=2, experts=8, ranks=2, mode=mode)
    group = type("Group", (), {"size": lambda self: 2})()
    setting = CallSetting(op, group, 0, "cpu", False)
    ready = deep_ep_calls.DEEP_EP[kind](setting)
    made[0].calls.clear()
    ready.run()
    ready.run()
    assert made[0].calls == [timed, timed]
    with pytest.raises(Unsupported, match="divide evenly"):
        deep_ep_calls.DEEP_EP[kind](CallSetting(op.replace(experts=9), setting.group, 0, "cpu", False))


def test_a_group_of_deep_ep_ends_its_memory_before_another_makes_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """On every rank of the old group, whether the next case has it or not: ending it waits for all."""
    from opcast.harness import deep_ep_calls
    from opcast.harness.deep_ep_calls import SharedBuffer, buffer_key

    alive: list[DeepEpBuffer] = []

    class Counted(DeepEpBuffer):
        def __init__(self, *given: Any, **more: Any) -> None:
            assert not alive, "two groups at a time"
            super().__init__(*given, **more)
            alive.append(self)

        def destroy(self) -> None:
            alive.remove(self)

    monkeypatch.setitem(sys.modules, "deep_ep", SimpleNamespace(Buffer=Counted))
    rank, group = SharedBuffer(), type("Group", (), {"size": lambda self: 4})()
    fast = make_op("ep_dispatch", "bf16", tokens=16, hidden=64, topk=2, experts=8, ranks=4, mode="low_latency")
    plain = fast.replace(mode="normal")
    four, two = (0, 1, 2, 3), (0, 1)
    rank.make_way(buffer_key(plain, four))
    first = rank.normal(group)
    rank.make_way(buffer_key(plain.replace(tokens=64), four))
    assert rank.normal(group) is first
    rank.make_way(buffer_key(plain, two))  # this rank is in no group of two
    assert not alive
    rank.make_way(buffer_key(fast, four))
    quick = rank.fast(group, fast)
    rank.make_way(buffer_key(fast.replace(tokens=128), four))
    assert rank.fast(group, fast.replace(tokens=128)) is quick
    assert quick.calls == [("clean", 16), ("clean", 128)]
    rank.make_way(buffer_key(fast.replace(hidden=128), four))
    assert not alive
    rank.make_way()
    assert deep_ep_calls.BUFFERS.buffer is None


def test_a_deep_ep_without_an_end_of_its_memory_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    from opcast.harness.deep_ep_calls import SharedBuffer

    class Old:
        def __init__(self, group: Any, nvl: int, rdma: int, low_latency_mode: bool = False) -> None: ...

    monkeypatch.setitem(sys.modules, "deep_ep", SimpleNamespace(Buffer=Old))
    group = type("Group", (), {"size": lambda self: 2})()
    with pytest.raises(Unsupported, match=r"too old .*explicitly_destroy"):
        SharedBuffer().normal(group)


BROKEN = {
    "assertion": "raise AssertionError('NCCL 2.27 is loaded, but 2.28 is linked')",
    "symbol": "raise ImportError('undefined symbol: _ZN3c10')",
    "driver": "raise RuntimeError('0 active drivers')",
    "name": "raise NameError('triton')",
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_package_that_fails_at_its_import_is_unsupported_with_its_words(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from opcast.harness.cases.packages import package

    (tmp_path / "deep_ep.py").write_text(BROKEN[how] + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    words = BROKEN[how].split("'")[1]
    with pytest.raises(Unsupported, match=f"{words}.*build github.com/deepseek-ai/DeepEP"):
        package("deep_ep")


@pytest.mark.parametrize(("copy", "told"), [("raise NameError('a broken copy')", True), ("x = 1", False), ("", False)])
def test_a_broken_copy_that_another_package_carries_is_told(
    copy: str, told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that is whole stands in, one that is not there is no news."""
    from opcast.harness.cases import packages

    (tmp_path / "ours").mkdir()
    if copy:
        (tmp_path / "ours" / "carried_copy.py").write_text(copy)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(packages.CARRIED, "deep_ep", "ours.carried_copy")
    for name in ("ours", "ours.carried_copy"):
        sys.modules.pop(name, None)
    if copy and not told:
        assert packages.package("deep_ep").x == 1
        return
    with pytest.raises(Unsupported, match=r"deep_ep is not installed .*: build") as refused:
        packages.package("deep_ep")
    assert ("and neither can ours.carried_copy (a broken copy)" in str(refused.value)) == told


def test_an_assertion_of_a_package_at_its_first_use_is_unsupported_and_ours_is_an_error(tmp_path: Path) -> None:
    """DeepGEMM asserts that it finds nvcc when its first kernel is built."""
    from opcast.harness.cases import refusals

    foreign = compile("assert cuda_home is not None, 'no CUDA toolkit'", str(tmp_path / "deep_gemm" / "jit.py"), "exec")
    with pytest.raises(Unsupported, match="no CUDA toolkit"), refusals():
        exec(foreign, {"cuda_home": None})
    from opcast.harness.cases import packages

    own = compile("assert False, 'a slip of ours'", packages.__file__, "exec")
    with pytest.raises(AssertionError, match="a slip of ours"), refusals():
        exec(own)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
@pytest.mark.parametrize("backend", WAYS)
@pytest.mark.parametrize("shape", DECODE)
def test_a_serving_kernel_runs_on_a_gpu(backend: str, shape: dict[str, Any]) -> None:
    op = make_op("attention_decode", "bf16", **{**shape, "head_dim": 128, "v_head_dim": 128})
    try:
        prepared = prepare(op, backend, "cuda")
    except Unsupported as reason:
        pytest.skip(str(reason))
    assert torch.isfinite(prepared.run().float()).all()


def test_rows_say_which_kernel_sdpa_took() -> None:
    op: Op = make_op("attention_prefill", "fp32", **PREFILL[0])
    assert prepare(op, "sdpa", "cpu").kernel == "flash"
    assert prepare(op, "math", "cpu").kernel == "math"
