"""How long a kernel takes in a world: laws of a few lines each, written for this purpose alone.

:func:`latency_us` is the truth about one op run by one kernel. None of opcast's own physics is used, only what an op
*is*: its dims, FLOPs and bytes (``datasets.ops``). The laws are simple, but not simpler than what makes GPUs hard to
predict: tiles and waves of products, splits of long sums, few rows that cannot fill the chip, kernels that never fall
below a floor, bandwidth that small sizes do not reach, a cache that holds some operands, formats and layouts that are
faster or slower, implementations that differ, and a part of every shape that no law tells.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from opcast.datasets.dtypes import itemsize
from opcast.datasets.experts import expert_loads, rows_and_touched
from opcast.datasets.ops import KINDS, Op
from opcast.tests.worlds.chip import World
from opcast.tests.worlds.links import collective_us

TILES = ((256, 128), (128, 256), (128, 128), (64, 128), (128, 64), (64, 64), (32, 64), (16, 64))
SPLITS = (1, 2, 4, 8, 16)
WEIGHT_ONLY = {"w4a16": 0.25, "w8a16": 0.5, "mxfp4a16": 0.27, "nf4": 0.27}  # bytes of a weight over those of bf16
MATRIX = ("gemm", "grouped_gemm", "fused_moe")
ATTENTION = ("attention_prefill", "attention_decode", "attention_backward", "mla_prefill", "mla_decode")
# Of the rate of products that a kernel of attention reaches at its best, forward and backward.
ATTENTION_RATE = {
    "flash_mla": (0.7, 0.5),
    "flash2": (0.55, 0.45),
    "flash3": (0.78, 0.62),
    "cudnn": (0.80, 0.65),
    "flashinfer": (0.72, 0.5),
    "trtllm": (0.80, 0.6),
    "efficient": (0.38, 0.3),
    "triton": (0.45, 0.35),
}


@dataclass(frozen=True)
class Launch:
    """One kernel of an eager form: what the framework launched, its bytes and its FLOPs on matrix units."""

    name: str
    bytes: float
    flops: float = 0.0
    dtype: str = "bf16"


def latency_us(world: World, op: Op, kernel: str, cache: str = "warm", launches: Sequence[Launch] = ()) -> float:
    """Microseconds of one execution at burst clocks. ``launches``: of an eager form, which runs kernel by kernel."""
    definition = KINDS[op.kind]
    if definition.family == "host":
        return _host_us(world, op)
    own = world.factor(world.chip.shape_spread, op)
    if definition.family in ("collective", "expert_parallel"):
        return own * collective_us(world, op, kernel)
    if launches:
        return own * sum(_launch_us(world, each, cache) for each in launches)
    return own * _kernel_us(world, op, kernel, cache)


def _kernel_us(world: World, op: Op, kernel: str, cache: str) -> float:
    spread = world.chip.kernel_spread
    if op.kind in MATRIX:
        factor = world.factor(0.6 * spread, kernel, op.kind, op.dtype)
        return factor * {"gemm": _gemm_us, "grouped_gemm": _grouped_us, "fused_moe": _experts_us}[op.kind](
            world, op, cache
        )
    if op.kind in ATTENTION:
        return world.factor(0.6 * spread, kernel, op.kind) * _attention_us(world, op, kernel, cache)
    plain = KINDS[op.kind].family in ("pointwise", "copy", "optimizer")  # one pass over memory: hard to do badly
    return world.factor(0.4 * spread if plain else spread, kernel, op.kind) * _moving_us(world, op, cache)


# --- memory --------------------------------------------------------------------------------------------


def bytes_us(world: World, size: float, cache: str, reach: float = 1.0) -> float:
    """Time to move so many bytes: from the cache as far as they fit there and it is warm, else from memory."""
    chip = world.chip
    held = 1.0 / (1.0 + (size / (0.6 * chip.l2_mib * 2**20)) ** 3) if cache == "warm" else 0.0
    taken = size / reach + chip.memory_half_bytes  # the first bytes wait for the memory, whatever their number
    return taken * (held / chip.l2_gbps + (1.0 - held) / chip.memory_gbps) / 1e3


def _launch_us(world: World, launch: Launch, cache: str) -> float:
    work = launch.flops / (0.55 * rate(world, launch.dtype) * 1e6)
    return world.chip.kernel_us + max(work, bytes_us(world, launch.bytes, cache))


def _moving_us(world: World, op: Op, cache: str) -> float:
    """Whatever memory bounds: the bytes, at the rate that the shape lets the kernel reach, over a floor."""
    cost, chip = op.cost, world.chip
    size, reach, kernels = float(cost.bytes), _reach(op), 1.0
    if op.kind == "copy" and op.direction:
        return 6.0 + op.size_bytes / (chip.bus_gbps * 1e3)
    if op.kind.startswith(("rms_norm", "layer_norm")) and op.kind.endswith("backward"):
        kernels, size = 2.0, size * 1.1  # sums over rows are added up by a second kernel
    if op.kind in ("embedding_backward", "cross_entropy", "moe_route"):
        kernels = 2.0
    if op.kind == "quantize" and op.block == 0:
        size *= 1.15  # the row's maximum first
    unit = rate(world, op.dtype) if cost.unit == "tensor" else chip.vector_tflops
    work = float(cost.flops) / (unit * 1e6 * (0.35 if cost.unit == "tensor" else 0.5))
    return kernels * chip.kernel_us + max(work, bytes_us(world, size, cache, reach))


def _reach(op: Op) -> float:
    """Share of the bandwidth that a shape's accesses reach."""
    reach = 1.0
    if KINDS[op.kind].row_wise and KINDS[op.kind].family == "norm":
        width = op.cols * itemsize(op.dtype)
        reach *= width / (width + 400.0)
        if width > 65536:
            reach *= 0.85  # a row that no block holds is read twice in part
    if run := getattr(op, "run", 0):
        reach *= min(1.0, run * itemsize(op.dtype) / 128.0) ** 0.5
    if op.kind == "copy" and op.run_bytes:
        reach *= min(1.0, op.run_bytes / 128.0) ** 0.5
    if op.kind.startswith("embedding"):
        reach *= 0.8 if op.kind == "embedding" else 0.45
    if op.kind in ("moe_permute", "moe_route"):
        reach *= 0.7
    if op.kind == "adamw":
        reach *= 0.92
    if op.kind == "reduce":
        blocks = op.outer * max(op.inner / 256.0, 1.0) * max(op.length / 8192.0, 1.0)
        reach *= min(1.0, blocks / 128.0) ** 0.5 if blocks < 128 else 1.0
    return max(reach, 0.02)


# --- products ------------------------------------------------------------------------------------------


def rate(world: World, dtype: str) -> float:
    """TFLOP/s of the best product in a format; one without units of its own runs on those of the next wider."""
    rates = world.chip.tflops
    for name in (dtype, {"mxfp4a8": "mxfp8", "w4a8": "fp8", "fp8_e5m2": "fp8", "int8": "fp8"}.get(dtype, ""), "bf16"):
        if name in rates:
            return rates[name]
    raise KeyError(dtype)


def _weight_bytes(dtype: str) -> float:
    return (
        2.0 * WEIGHT_ONLY[dtype]
        if dtype in WEIGHT_ONLY
        else float({"mxfp4a8": 0.53, "nvfp4": 0.56}.get(dtype, itemsize(dtype)))
    )


def _gemm_us(world: World, op: Op, cache: str) -> float:
    out = itemsize(op.out_dtype)
    moved = op.batch * (op.m * op.k * itemsize(op.dtype) + op.n * op.k * _weight_bytes(op.dtype) + op.m * op.n * out)
    work = _tiled_us(world, [op.m] * 1, op.n, op.k, op.dtype, op.batch)
    layout = world.factor(0.03, "layout", op.layout, op.dtype)
    ragged = 1.0
    if op.k % 64 or op.n % 8:
        ragged = 1.15
    if op.k % 8 or op.n % 8:
        ragged = 2.2
    return _joined(world, work * layout * ragged, bytes_us(world, moved, cache))


def _joined(world: World, work: float, moving: float) -> float:
    chip = world.chip
    return chip.kernel_us + max(work, moving) + chip.both * min(work, moving)


def _tiled_us(world: World, rows: Iterable[float], n: int, k: int, dtype: str, batch: int = 1) -> float:
    """The best tile and split for products of so many rows each, all in one launch."""
    chip, best = world.chip, math.inf
    rows = list(rows)
    per_unit = rate(world, dtype) * 1e6 / chip.units  # FLOP in a microsecond
    for tile_m, tile_n in TILES:
        side = tile_m * tile_n / (tile_m + tile_n)
        speed = per_unit * side / (side + chip.tile_half) * 1.3
        tiles = batch * sum(math.ceil(m / tile_m) for m in rows) * math.ceil(n / tile_n)
        for split in SPLITS if k >= 1024 else SPLITS[:1]:
            waves = tiles * split / chip.units
            whole = math.ceil(waves) if waves > 1 else 1.0
            whole = 0.7 * whole + 0.3 * max(waves, 1.0)  # tiles of the last wave have the caches for themselves
            each = 2.0 * tile_m * tile_n * (k / split) / min(speed, per_unit)
            sums = (split > 1) * (0.5 * chip.kernel_us + batch * sum(rows) * n * 4.0 * split / (chip.l2_gbps * 1e3))
            best = min(best, whole * (each + chip.prologue_us) + sums)
    return best


def _grouped_us(world: World, op: Op, cache: str) -> float:
    """One launch over all experts, the busiest with its part of the rows, the rest alike."""
    busiest = min(op.tokens, op.tokens * op.imbalance / (100.0 * op.experts))
    others = (op.tokens - busiest) / max(op.experts - 1, 1)
    rows = [busiest, *[others] * (op.experts - 1)]
    touched = [each for each in rows if each >= 0.5] or [1.0]
    if KINDS["grouped_gemm"].dims[5].choices[op.layout] == "tn":
        work = op.experts * _tiled_us(world, [op.k], op.n, max(1, op.tokens // op.experts), op.dtype) * 0.8
        moved = op.tokens * (op.k + op.n) * itemsize(op.dtype) + op.experts * op.k * op.n * itemsize(op.out_dtype)
    else:
        work = _tiled_us(world, touched, op.n, op.k, op.dtype)
        moved = op.tokens * (op.k * itemsize(op.dtype) + op.n * itemsize(op.out_dtype))
        moved += min(op.experts, op.tokens) * op.k * op.n * _weight_bytes(op.dtype)
    return 0.5 * world.chip.kernel_us + _joined(world, 1.06 * work, bytes_us(world, moved, cache))


def _experts_us(world: World, op: Op, cache: str) -> float:
    """Routing, both products of the busiest rank's experts with what is between them, and the sum: five kernels."""
    chip = world.chip
    loads = expert_loads(op.tokens, op.topk, op.experts, op.ep, op.skew)
    rows, touched = (max(float(each), 1.0) for each in rows_and_touched(*loads))
    width, each = max(op.inter // op.tp, 1), max(rows / touched, 1.0)
    spread = [each * (0.5 + i / max(touched - 1.0, 1.0)) for i in range(max(int(touched), 1))]
    work = _tiled_us(world, spread, (1 + op.gated) * width, op.hidden, op.dtype)
    work += _tiled_us(world, spread, op.hidden, width, op.dtype)
    weights = touched * (2 + op.gated) * op.hidden * width * _weight_bytes(op.dtype)
    between = rows * (2.0 * op.hidden + 3.0 * width) * 2.0
    return 4.0 * chip.kernel_us + _joined(world, 1.1 * work, bytes_us(world, weights + between, cache))


# --- attention -----------------------------------------------------------------------------------------


def _attention_us(world: World, op: Op, kernel: str, cache: str) -> float:
    chip, cost = world.chip, op.cost
    if op.kind.endswith("_decode"):
        return _decode_us(world, op, cache)
    forward, backward = ATTENTION_RATE.get(kernel, ATTENTION_RATE["flash2"])
    share = backward if op.kind.endswith("backward") else forward
    heads = op.heads if op.kind.startswith("mla") else op.heads_q
    dim = 192 if op.kind.startswith("mla") else op.head_dim
    share *= {64: 0.8, 80: 0.7, 96: 0.8, 128: 1.0, 192: 0.95, 256: 0.85}.get(dim, 0.75)
    blocks = op.batch * heads * math.ceil(op.seq_q / 128)
    waves = blocks / chip.units
    filled = waves / (0.6 * math.ceil(waves) + 0.4 * max(waves, 1.0))
    padded = math.ceil(op.seq_q / 128) * 128 / op.seq_q
    masked = 1.0 + (64.0 / op.seq_kv if op.causal else 0.0)  # blocks on the diagonal are computed whole
    work = float(cost.flops) * padded * masked / (rate(world, op.dtype) * 1e6 * share * filled)
    passes = 3.0 if op.kind.endswith("backward") else 1.0  # rows of dO·O before, the sums of dQ after
    return passes * chip.kernel_us + _joined(world, work, bytes_us(world, float(cost.bytes), cache))


def _decode_us(world: World, op: Op, cache: str) -> float:
    """Bound by reading the cache; few sequences are split over the chip, and their parts joined by a second kernel."""
    chip, cost = world.chip, op.cost
    heads = 1 if op.kind.startswith("mla") else op.heads_kv
    pieces = op.batch * heads * math.ceil(op.seq_kv / 256)
    spread = min(1.0, pieces / chip.units) ** 0.5
    alone = op.batch * heads < chip.units and op.seq_kv > 256
    work = float(cost.flops) / (rate(world, op.dtype) * 1e6 * (0.45 if op.kind.startswith("mla") else 0.25))
    moving = bytes_us(world, float(cost.bytes), cache, 0.9 * spread)
    return (
        (1.6 if alone else 1.0) * chip.kernel_us
        + 0.8 * chip.prologue_us
        + max(work, moving)
        + chip.both * min(work, moving)
    )


# --- host and clocks -----------------------------------------------------------------------------------


def _host_us(world: World, op: Op) -> float:
    if op.kind == "host_pass":
        return 1.0 + float(op.size_bytes) / 20e3
    what = KINDS["host_overhead"].dims[0].choices[op.what]
    return op.calls * world.chip.host_us[what]


def clock_kept(world: World, op: Op, burst_us: float) -> tuple[float, float]:
    """The clock over that of a burst which the limit leaves a product that runs for long, and how busy it keeps units.

    Power is a part that idles and one that grows with the rate that the product reaches and with the clock to
    ``alpha``; memory keeps its clock.
    """
    definition, chip = KINDS[op.kind], world.chip
    if definition.family not in ("gemm", "attention", "moe") or op.cost.unit != "tensor":
        return 1.0, 0.0
    busy = min(float(op.cost.flops) / (rate(world, op.dtype) * 1e6) / burst_us, 1.0)
    if 0.25 + 0.75 * busy <= chip.limit:
        return 1.0, busy
    return max((chip.limit - 0.25) / (0.75 * busy), 0.3) ** (1.0 / (chip.alpha + 1.0)), busy


def held_back(world: World, op: Op, burst_us: float) -> float:
    """How many times longer a product takes in a step that runs for long: the clock falls until its power fits."""
    clock, busy = clock_kept(world, op, burst_us)
    return 1.0 + busy * (1.0 / clock - 1.0)


__all__ = ["Launch", "bytes_us", "clock_kept", "held_back", "latency_us", "rate"]
