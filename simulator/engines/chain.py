"""The engines in the order of the rule of ``models/choice.py``: for a stack, or for nobody in particular.

Where measured rows and predictors are asked in turn:

1. own rows of this very op, then the predictors of own rows, of the kernel that is launched (:mod:`.own`); sums that an
   engine leaves to NCCL by rows of that (:mod:`.sums`),
2. rows of other labs for this very op,
3. tables of other labs: readings that the stack names (:mod:`.kernels`), the library's call (:mod:`.library`), those of
   the stack's own framework,
4. own rows of another kernel, then any table, own ones first,
5. and of other devices those of the framework, then any.

What a user asked of one backend by its name, and a CPU, which has one kernel for an op, keep the plain order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ...datasets.devices import Device
from ...models.choice import ANYONE, Caller
from ..question.plan import Stack
from .answers import Engine
from .kernels import KernelsEngine
from .learned import LearnedEngine
from .library import LibraryEngine
from .measured import MeasuredEngine
from .own import OwnEngine
from .sums import LargeSumsEngine
from .transfer import TransferEngine

JOINS_NOTHING = (
    "int_bookkeeping",
    "bias_apart",
    "bias",
    "qkv",
    "gate_up",
)  # rules of fusion that make no kernel of two


def caller_of(stack: Stack | None, device: Device) -> Caller:
    """Who launches the ops of a stack on a device. On a CPU there is nothing to choose from."""
    if stack is None:
        return replace(ANYONE, architecture=device.architecture)
    eager = None if device.synchronous else not set(stack.fusion) - set(JOINS_NOTHING)
    return Caller(stack.id, stack.backend, stack.collectives, stack.attention, device.architecture, eager)


def chained(engines: Sequence[Engine], stack: Stack | None) -> list[Engine]:
    """The engines with each clause of the rule as one of its own."""
    learned = next((each for each in engines if isinstance(each, LearnedEngine)), None)
    measured = next((each for each in engines if isinstance(each, MeasuredEngine)), None)
    found: list[Engine] = []
    for each in engines:
        if isinstance(each, MeasuredEngine) and _divided(each):
            each = replace(each, caller=caller_of(stack, each.device))
            found += large_sums(each, learned)
            found.append(replace(each, rows="own"))
            if learned is not None and _divided(learned) and not _holds(found, OwnEngine):
                found.append(own_engine(learned, stack))
            found.append(replace(each, rows="others"))
            if learned is None:
                found.append(replace(each, rows="rest"))
        elif isinstance(each, LearnedEngine) and each.backend is None:
            each = replace(each, caller=caller_of(stack, each.device))
            if _divided(each) and not _holds(found, OwnEngine):
                found.append(own_engine(each, stack))
            found += tables(each, stack)
            if measured is not None and _divided(measured):
                if stack is None:
                    found.append(replace(each, rows="others"))
                found.append(replace(measured, rows="rest", caller=each.caller))
            found.append(each)
        elif isinstance(each, TransferEngine) and each.backend is None:
            each = replace(each, caller=caller_of(stack, each.device))
            found += [*(replace(each, backend=name) for name in frameworks(stack)), each]
        else:
            found.append(each)
    return found


def large_sums(measured: MeasuredEngine, learned: LearnedEngine | None) -> Iterator[Engine]:
    """Own rows of NCCL, and predictors of them, for the sums that a serving engine leaves to it."""
    if not measured.caller.engine or measured.caller.collectives:
        return
    plain = replace(measured.caller, engine="", framework="")
    yield LargeSumsEngine(replace(measured, rows="own", caller=plain))
    if learned is not None and _divided(learned):
        yield LargeSumsEngine(replace(learned, rows="own", caller=plain))


def own_engine(learned: LearnedEngine, stack: Stack | None) -> OwnEngine:
    """Predictors of own rows of the kernel that a stack launches, before the tables that they correct."""
    learned = replace(learned, caller=caller_of(stack, learned.device))
    others = replace(learned, rows="others")
    return OwnEngine(replace(learned, rows="own"), [*tables(others, stack), others])


def tables(learned: LearnedEngine, stack: Stack | None) -> Iterator[Engine]:
    """Who is asked before just any table: what the stack's framework launches.

    Products of a stack that serves nothing are those of the library that PyTorch calls.
    """
    if stack is None:
        return
    if stack.kernels:
        yield KernelsEngine(learned, stack.kernels)
    if not stack.backend:
        yield LibraryEngine(learned.device, learned.registries)
    for name in frameworks(stack):
        yield replace(learned, backend=name)


def frameworks(stack: Stack | None) -> list[str]:
    """Whose tables answer for a stack: of its collectives, then of its framework."""
    return [name for name in (stack.collectives, stack.backend) if name] if stack is not None else []


def _divided(engine: LearnedEngine | MeasuredEngine) -> bool:
    """Whether an engine is asked clause by clause."""
    return engine.backend is None and not engine.device.synchronous


def _holds(engines: Sequence[Engine], kind: type) -> bool:
    return any(isinstance(each, kind) for each in engines)
