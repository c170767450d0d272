"""How the latency of a call grows with what was touched since it was last made, on the CPU at hand.

Warm and cold are the two ends of a curve (:mod:`opcast.datasets.reuse`). Before each timed call so many bytes are read,
and then a few other operators run, as in a model's step. Calls on next to no data tell how code goes cold, calls on
data the rest: of these the caches are emptied and the call is made once before the bytes are read, because a step
touches its tensors once and not in a loop.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..datasets.ops import KINDS, make_op
from ..datasets.reuse import USUAL
from .host_timer import calls_per_sample, flusher
from .sampler import warm_up

if TYPE_CHECKING:
    from .cases.base import Prepared

Call = Callable[[], object]

HOW = "measured: calls after so many bytes were read; Python: that of a small decoder of transformers"
FIRST, LAST = 18, 27  # log2 of the distances in bytes: from within the first caches to beyond the last
ROUNDS, FEWEST = 11, 4
PROBE_S = 1.0  # for the rounds of one probe
QUANTILE = 0.35  # of the samples: below the median, as what disturbs a call only ever makes it longer
WARM_S = 0.01
LEAST_GAIN = 0.1  # of the warm latency, that a cold call is slower by
MOST_APART = 4.0  # times the usual cost of being cold that a probe's is at most
CODE, DATA = "code", "data"
HEADS = {"batch": 1, "head_dim": 64, "v_head_dim": 64, "seq_q": 1}
# (part, kind, dims) of what is timed: on a few hundred bytes, and on some half a MiB.
PROBES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    (CODE, "gemm", {"m": 1, "n": 32, "k": 32}),
    (DATA, "gemm", {"m": 1, "n": 512, "k": 384}),
    (CODE, "attention_decode", {**HEADS, "heads_q": 2, "heads_kv": 2, "seq_kv": 8}),
    (DATA, "attention_decode", {**HEADS, "heads_q": 4, "heads_kv": 4, "seq_kv": 384}),
    (CODE, "elementwise", {"numel": 64, "inputs": 2}),
    (CODE, "elementwise", {"numel": 64, "inputs": 1, "fn": "exponential"}),
    (DATA, "elementwise", {"numel": 1 << 16, "inputs": 2}),
    (CODE, "softmax", {"rows": 1, "cols": 64}),
    (DATA, "softmax", {"rows": 128, "cols": 768}),
    (CODE, "copy", {"size_bytes": 4096, "run_bytes": 128}),
    (DATA, "copy", {"size_bytes": 3 << 17, "run_bytes": 256}),
    (CODE, "embedding", {"tokens": 1, "vocab": 64, "hidden": 64}),
    (DATA, "embedding", {"tokens": 96, "vocab": 96, "hidden": 1024}),
)


def measure_reuse() -> dict[str, Any]:
    """The curves of the CPU at hand with torch's present threads, as the fields of ``ReuseCurves``; in some ten s."""
    sizes = distances()
    touch, beside, empty = Toucher(sizes[-1]), neighbours(), flusher()
    samples: list[Seen] = []
    with torch.no_grad():
        for probed, kind, dims in PROBES:
            run = prepared(kind, dims).run
            first = (empty, run) if probed == DATA else (run,)
            after = [partial(in_turn, (*first, partial(touch, size), beside)) for size in sizes]
            warm, _ = warm_us(run), samples_us(run, after[:1], 1)
            *late, cold = np.quantile(samples_us(run, [*after, empty]), QUANTILE, axis=1).tolist()
            samples.append(Seen(probed, KINDS[kind].family, warm, late, cold))
        host = host_us(touch, sizes) if importlib.util.find_spec("transformers") else ()
    plain = without_disturbed(samples)
    return {
        "distances": tuple(map(float, sizes)),
        "code": curves_of(plain, CODE),
        "data": curves_of(plain, DATA),
        "code_us": float(np.median([sample.whole for sample in plain if sample.part == CODE])),
        "host_us": tuple(isotonic(host)),
    }


@dataclass(frozen=True)
class Seen:
    """A probe: microseconds of its calls in a loop, after each distance, and after the whole cache was read."""

    part: str
    family: str
    warm_us: float
    late_us: list[float]
    cold_us: float

    @property
    def whole(self) -> float:
        """What the way from warm to cold is, for code; for data to beyond every cache, its code in use before."""
        return (self.cold_us if self.part == CODE else max(self.late_us)) - self.warm_us

    @property
    def shares(self) -> np.ndarray:
        """How far on that way each distance is [distances]."""
        return np.clip((np.array(self.late_us) - self.warm_us) / self.whole, 0.0, 1.0)


def without_disturbed(samples: Sequence[Seen]) -> list[Seen]:
    """The probes whose cost of being cold is of the size of the others'; a busy machine spoils some."""
    undisturbed_samples = []
    for probed in (CODE, DATA):
        of_part = [sample for sample in samples if sample.part == probed and sample.whole > LEAST_GAIN * sample.warm_us]
        usual = float(np.median([sample.whole for sample in of_part])) if of_part else 0.0
        undisturbed_samples += [
            sample for sample in of_part if usual / MOST_APART <= sample.whole <= usual * MOST_APART
        ]
    return undisturbed_samples


def curves_of(samples: Sequence[Seen], probed: str) -> dict[str, tuple[float, ...]]:
    """By family, shares that never fall; those of data end at 1, because nothing is left of it beyond every cache.

    The usual family's is that of all probes where its own were spoilt.
    """
    of_part = [sample for sample in samples if sample.part == probed]
    by_family = {
        family: [sample.shares for sample in of_part if sample.family == family]
        for family in {e.family for e in of_part}
    }
    by_family.setdefault(USUAL, [sample.shares for sample in of_part])
    curves = {}
    for family, shares in sorted(by_family.items()):
        curve = np.array(isotonic(np.mean(shares, axis=0).tolist()))
        curves[family] = tuple((curve / curve[-1] if probed == DATA else curve).tolist())
    return curves


def prepared(kind: str, dims: dict[str, Any]) -> Prepared:
    """An op in fp32 as the campaign runs it."""
    from .cases import backends, prepare

    op = make_op(kind, dtype="fp32", **dims)
    return prepare(op, (backends(op, "cpu") or ["torch"])[0], "cpu", 1)


def in_turn(calls: Sequence[Call]) -> None:
    """Make some calls."""
    for call in calls:
        call()


def distances() -> list[int]:
    """Bytes that are read between two calls, ascending."""
    from .cases.base import COLD_CACHES, cache_bytes

    beyond = COLD_CACHES * cache_bytes("cpu")
    return [0, *(1 << power for power in range(FIRST, LAST + 1) if 1 << power < beyond), beyond]


class Toucher:
    """Reads so many bytes with every thread."""

    def __init__(self, most_bytes: int) -> None:
        self.buffer = torch.ones(most_bytes // 4)

    def __call__(self, size_bytes: int) -> None:
        """Read that many bytes, none for 0."""
        if size_bytes:
            self.buffer[: size_bytes // 4].sum()


def neighbours() -> Callable[[], None]:
    """A few small operators of other kinds, which run between any two calls of one operator in a model."""
    x, y, square = torch.ones(1, 64), torch.ones(1, 64), torch.ones(64, 64)

    def run() -> None:
        torch.cat((torch.neg(x), torch.maximum(x, y)), -1).view(2, 64).transpose(0, 1)
        torch.tanh(torch.mm(x, square)).unsqueeze(0).expand(2, 1, 64).reshape(2, 64)

    return run


def samples_us(run: Callable[[], object], before: Sequence[Callable[[], object]], rounds: int = ROUNDS) -> np.ndarray:
    """Microseconds of calls after each of ``before``, in turn, so that drift meets all alike: [before, rounds].

    On a busy machine fewer rounds than asked for, :data:`FEWEST` at least.
    """
    latencies_us = np.empty((len(before), rounds))
    late = time.perf_counter() + PROBE_S
    for number in range(rounds):
        if number >= FEWEST and time.perf_counter() > late:
            return latencies_us[:, :number]
        for index, prepare in enumerate(before):
            prepare()
            start = time.perf_counter_ns()
            run()
            latencies_us[index, number] = (time.perf_counter_ns() - start) / 1e3
    return latencies_us


def warm_us(run: Callable[[], object]) -> float:
    """Median microseconds of a call in a loop."""
    calls = calls_per_sample(warm_up(run, WARM_S, time.perf_counter_ns))

    def loop() -> None:
        for _ in range(calls):
            run()

    return float(np.quantile(samples_us(loop, [lambda: None], ROUNDS), QUANTILE)) / calls


def isotonic(values: Sequence[float]) -> list[float]:
    """The nearest sequence that never falls (pool adjacent violators)."""
    pools: list[list[float]] = []
    for value in values:
        pools.append([float(value), 1.0])
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            mean, weight = pools.pop()
            pools[-1] = [(pools[-1][0] * pools[-1][1] + mean * weight) / (pools[-1][1] + weight), pools[-1][1] + weight]
    return [mean for mean, weight in pools for _ in range(int(weight))]


# --- the Python of modelling code ----------------------------------------------------------------------

LAYERS = 4


class Apart:
    """A call that is not in the time of what makes it."""

    def __init__(self, call: Call) -> None:
        self.call, self.spent_ns = call, 0

    def __call__(self, *_: object) -> None:
        start = time.perf_counter_ns()
        self.call()
        self.spent_ns += time.perf_counter_ns() - start

    def timed_us(self, call: Call) -> float:
        """Microseconds of ``call`` without those that were spent here inside it."""
        self.spent_ns, start = 0, time.perf_counter_ns()
        call()
        return (time.perf_counter_ns() - start - self.spent_ns) / 1e3


def host_us(touch: Toucher, sizes: Sequence[int]) -> list[float]:
    """Microseconds of Python around one operator of modelling code, of which each layer runs so many bytes apart.

    A decoder of transformers runs one token with widths so small that its operators hardly take time; the same
    operators are then called one after the other without its code. What lies between the two is the code's.
    """
    run, layers = tiny_decoder()
    latencies_us = []
    for size in sizes:
        apart = Apart(partial(touch, size))
        hooks = [layer.register_forward_pre_hook(apart) for layer in layers]
        calls = recorded(run, apart)
        operators = sum(not isinstance(func, Apart) and not func.is_view for func, _, _ in calls)

        def replay(calls: Sequence[tuple[Any, Any, Any]] = calls) -> None:
            for func, args, kwargs in calls:
                func(*args, **kwargs)

        pairs = [(apart.timed_us(run), apart.timed_us(replay)) for _ in range(ROUNDS + 2)][2:]
        for hook in hooks:
            hook.remove()
        code, alone = np.quantile(pairs, QUANTILE, axis=0).tolist()
        latencies_us.append(max(code - alone, 0.0) / operators)
    assert not torch.is_grad_enabled()
    return latencies_us


def tiny_decoder() -> tuple[Call, Sequence[Any]]:
    """One token through a small Llama of transformers with a cache of a few, and its layers."""
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    sizes: Any = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=LAYERS, vocab_size=64)).eval()
    cache = DynamicCache(config=model.config)
    model(torch.arange(8).view(1, 8), None, None, cache)  # in its place, as releases differ in its name
    token = torch.ones(1, 1, dtype=torch.int64)

    def run() -> None:
        model(token, None, None, cache, use_cache=True)
        cache.crop(-1)

    return run, model.model.layers


def recorded(run: Call, apart: Apart) -> list[tuple[Any, Any, Any]]:
    """Every operator call of a run with its arguments, and the calls of ``apart`` between them."""
    calls: list[tuple[Any, Any, Any]] = []
    usual = apart.call

    class ArgumentsKept(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append((func, args, kwargs or {}))
            return func(*args, **(kwargs or {}))

    apart.call = lambda: calls.append((apart, (), {}))
    with ArgumentsKept():
        run()
    apart.call = usual
    return calls
