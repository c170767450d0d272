"""The engines in the order of the rule of ``models/choice.py``: for a stack, or for nobody in particular.

A collective of a single rank moves nothing, whoever is asked (:mod:`.single_ranks`). Where measured rows and predictors
are asked in turn:

0. products with few rows and experts of few bits: kernels of the stack's own, and others where a table contradicts
   bytes over bandwidth (:mod:`.mat_vec`); caches that a table reads faster than memory (:mod:`.streams`); weights that
   are unpacked (:mod:`.unpacked`),
1. own rows of this very op, then the predictors of own rows, of the kernel that is launched (:mod:`.own_rows`); sums
   that an engine leaves to NCCL by rows of that, and sums with the norm in them by rows of kernels that have it
   (:mod:`.large_sums`),
2. rows of other labs for this very op,
3. tables of other labs: readings that the stack names (:mod:`.kernels`), the library's call (:mod:`.library`), those of
   the stack's own framework; experts of few bits that it has in more bits alone by those of a near device,
4. own rows of another kernel, then any table, own ones first,
5. and of other devices readings that the stack names, those of the framework, then any.

What a user asked of one backend by its name, and a CPU, which has one kernel for an op, keep the plain order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ...datasets.devices import Device
from ...datasets.launches import ANYONE, Caller
from ..question.plan import Stack
from .answers import Engine
from .kernels import KernelsEngine
from .large_sums import LargeSumsEngine, NormSumsEngine, OwnSumsEngine
from .learned import LearnedEngine
from .library import LibraryEngine, ThrottledEngine
from .mat_vec import EIGHT_BITS, FewRowsEngine, MatVecEngine
from .measured import MeasuredEngine
from .network import NetworkEngine
from .own_rows import OwnEngine
from .single_ranks import SingleRankEngine
from .streams import StreamEngine
from .transfer import NearFormatEngine, TransferEngine
from .unpacked import UnpackedEngine

RULES_WITHOUT_KERNEL = (
    "int_bookkeeping",
    "bias_apart",
    "log_probs_apart",
    "bias",
    "qkv",
    "gate_up",
)  # rules of fusion that make no kernel of two


def caller_of(stack: Stack | None, device: Device) -> Caller:
    """Who launches the ops of a stack on a device. On a CPU there is nothing to choose from."""
    if stack is None:
        return replace(ANYONE, architecture=device.architecture)
    eager = None if device.synchronous else not set(stack.fusion) - set(RULES_WITHOUT_KERNEL)
    return Caller(stack.id, stack.backend, stack.collectives, stack.attention, device.architecture, eager)


def order_engines(engines: Sequence[Engine], stack: Stack | None) -> list[Engine]:
    """The engines with each clause of the rule as one of its own."""
    learned = next((engine for engine in engines if isinstance(engine, LearnedEngine)), None)
    measured = next((engine for engine in engines if isinstance(engine, MeasuredEngine)), None)
    transfer = next((engine for engine in engines if isinstance(engine, TransferEngine)), None)
    chain: list[Engine] = []
    for engine in engines:
        if isinstance(engine, MeasuredEngine) and _asked_by_clause(engine):
            engine = replace(engine, caller=caller_of(stack, engine.device))
            chain += large_sum_engines(engine, learned)
            chain.append(replace(engine, rows="own"))
            if learned is not None and _asked_by_clause(learned) and not _contains(chain, OwnEngine):
                chain.append(own_engine(learned, stack))
            chain.append(replace(engine, rows="others"))
            if learned is None:
                chain.append(replace(engine, rows="rest"))
        elif isinstance(engine, LearnedEngine) and engine.backend is None:
            engine = replace(engine, caller=caller_of(stack, engine.device))
            if _asked_by_clause(engine) and not _contains(chain, OwnEngine):
                chain.append(own_engine(engine, stack))
            chain += framework_tables(engine, stack)
            if transfer is not None and transfer.backend is None:
                chain += near_formats(engine, transfer, stack)
            if measured is not None and _asked_by_clause(measured):
                if stack is None:
                    chain.append(replace(engine, rows="others"))
                chain.append(replace(measured, rows="rest", caller=engine.caller))
            chain += [ThrottledEngine(LibraryEngine(engine.device, engine.registries), engine), engine]
        elif isinstance(engine, TransferEngine) and engine.backend is None:
            engine = replace(engine, caller=caller_of(stack, engine.device))
            chain += [KernelsEngine(engine, stack.kernels)] if stack is not None and stack.kernels else []
            chain += [*(replace(engine, backend=name) for name in framework_names(stack)), engine]
        else:
            if isinstance(engine, NetworkEngine) and stack is not None and sums_itself(engine, stack):
                chain.append(OwnSumsEngine(engine.device, engine.cluster.mesh_links))
            chain.append(engine)
    few_rows = few_row_engines(engines, chain, stack)
    chain = [SingleRankEngine(), *few_rows, *chain]
    own = list(norm_sums(engines, stack))
    device = next((engine.device for engine in (*own, *engines) if hasattr(engine, "device")), None)
    return chain if device is None else [NormSumsEngine(device, own, chain), *chain]


def few_row_engines(engines: Sequence[Engine], chain: Sequence[Engine], stack: Stack | None) -> list[Engine]:
    """Who answers before a table what waits for memory: a stack's own kernels for products with few rows, the bytes of
    their weights, and those of caches."""
    device = next((engine.device for engine in engines if isinstance(engine, (LearnedEngine, TransferEngine))), None)
    if device is None or any(getattr(engine, "backend", None) for engine in engines):
        return []
    kernels = MatVecEngine(device, stack.mat_vecs) if stack is not None and stack.mat_vecs else None
    eight_bits = [name for name in EIGHT_BITS if device.supports(name)]
    kernel_engines: list[Engine] = [] if kernels is None else [kernels]
    if device.synchronous:
        return kernel_engines
    few_rows = FewRowsEngine(chain, eight_bits, kernels, device)
    unpackings = stack.unpackings if stack is not None else ()
    table_engines: list[Engine] = [StreamEngine(device, [few_rows, *chain]), few_rows]
    return [*kernel_engines, UnpackedEngine(device, [*table_engines, *chain], unpackings), *table_engines]


def sums_itself(network: NetworkEngine, stack: Stack) -> bool:
    """Whether a stack has a kernel of its own for sums on a mesh: vLLM's ``CustomAllreduce``, of which SGLang's is."""
    return bool(network.cluster.mesh_links) and stack.backend in ("vllm", "sglang") and not stack.collectives


def norm_sums(engines: Sequence[Engine], stack: Stack | None) -> Iterator[MeasuredEngine | LearnedEngine]:
    """Rows of all-reduces with the norm in them, and predictors of own ones."""
    for engine in engines:
        if isinstance(engine, MeasuredEngine):
            yield replace(engine, caller=replace(caller_of(stack, engine.device), norm=True))
        elif isinstance(engine, LearnedEngine) and _asked_by_clause(engine):
            yield replace(engine, rows="own", caller=replace(caller_of(stack, engine.device), norm=True))


def large_sum_engines(measured: MeasuredEngine, learned: LearnedEngine | None) -> Iterator[Engine]:
    """Own rows of NCCL, and predictors of them, for the sums that a serving engine leaves to it."""
    if not measured.caller.engine or measured.caller.collectives:
        return
    nccl_caller = replace(measured.caller, engine="", framework="")
    yield LargeSumsEngine(replace(measured, rows="own", caller=nccl_caller))
    if learned is not None and _asked_by_clause(learned):
        yield LargeSumsEngine(replace(learned, rows="own", caller=nccl_caller))


def own_engine(learned: LearnedEngine, stack: Stack | None) -> OwnEngine:
    """Predictors of own rows of the kernel that a stack launches, before the tables that they correct."""
    learned = replace(learned, caller=caller_of(stack, learned.device))
    others = replace(learned, rows="others")
    return OwnEngine(replace(learned, rows="own"), [*framework_tables(others, stack), others])


def framework_tables(learned: LearnedEngine, stack: Stack | None) -> Iterator[Engine]:
    """Who is asked before just any table: what the stack's framework launches.

    Products of a stack that serves nothing are those of the library that PyTorch calls.
    """
    if stack is None:
        return
    if stack.kernels:
        yield KernelsEngine(learned, stack.kernels)
    if not stack.backend:
        yield LibraryEngine(learned.device, learned.registries)
    for name in framework_names(stack):
        table = replace(learned, backend=name)
        yield ThrottledEngine(LibraryEngine(learned.device, learned.registries), table)
        yield table


def near_formats(learned: LearnedEngine, transfer: TransferEngine, stack: Stack | None) -> Iterator[Engine]:
    """Tables of the stack's framework on near devices, for formats that its tables of this device leave to them."""
    for name in framework_names(stack):
        kin = replace(transfer, backend=name, caller=learned.caller, named=True)
        yield NearFormatEngine(replace(learned, backend=name), kin)


def framework_names(stack: Stack | None) -> list[str]:
    """Whose tables answer for a stack: of its collectives, then of its framework."""
    return [name for name in (stack.collectives, stack.backend) if name] if stack is not None else []


def _asked_by_clause(engine: LearnedEngine | MeasuredEngine) -> bool:
    """Whether an engine is asked clause by clause."""
    return engine.backend is None and not engine.device.synchronous


def _contains(engines: Sequence[Engine], kind: type) -> bool:
    return any(isinstance(engine, kind) for engine in engines)
