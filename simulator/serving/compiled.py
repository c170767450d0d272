"""The event loop as machine code: numba, kept on disk; as plain Python where numba is not installed.

All functions of the loop are compiled as one (:mod:`.one_module`). What is kept on disk is known by a hash of their
sources, so that a change in any of their modules is seen.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import types
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..question.serving import POLICIES, ROUTERS
from . import (
    adapters,
    admission,
    batch_time,
    blocks,
    chain,
    counted,
    counting,
    due,
    fleet,
    histogram,
    iteration,
    lanes,
    limits,
    loop,
    moving,
    order,
    policies,
    priorities,
    queues,
    repeating,
    routing,
    rules,
    scorers,
    state,
    tiers,
    uneven,
)

PARTS = (
    *(
        iteration,
        batch_time,
        histogram,
        rules,
        lanes,
        due,
        blocks,
        limits,
        order,
        adapters,
        tiers,
        uneven,
        queues,
        priorities,
        admission,
    ),
    *policies.MODULES,
    *(repeating, fleet, scorers, counted, routing, moving, state, counting),
)
CHAINS = (policies.FORMS, policies.AGAIN, routing.ROUTES)
PLAIN = {"empty_state", "with_room", "linear_tables", "tree_of", "tokens_allowed", "rejections", "rejection_note"}
"""With numpy or texts of their own, never called by the loop."""
NUMBA_OWN = ("by_address.py", "one_module.py")
"""What is told to numba's compiler itself."""
OPTIONS: dict[str, Any] = {"_nrt": False, "error_model": "numpy"}
"""Nothing is allocated inside, so that no reference is counted: each call would count all arrays of the state."""


@lru_cache
def compiled() -> Callable[..., None]:
    """:func:`.loop.run` as machine code, or as it stands without numba."""
    if importlib.util.find_spec("numba") is None:
        return loop.run
    import numba

    for module in (*PARTS, loop):
        for name, function in vars(module).items():
            if (
                inspect.isfunction(function)
                and function.__module__ == module.__name__
                and name not in PLAIN
                and name[0] != "_"
            ):
                numba.extending.register_jitable(**OPTIONS)(function)
    for links in CHAINS:
        for link in links[1:]:
            numba.extending.register_jitable(**OPTIONS)(link)
    from .by_address import by_address
    from .one_module import pipeline

    names = {"__name__": __name__, "run": loop.run, "by_address": by_address}
    named = types.FunctionType(run_by_address.__code__, names, "run")
    named.__qualname__ = f"run_{source_hash()}"
    try:
        return numba.njit(cache=True, nogil=True, **OPTIONS, **pipeline())(named)
    except RuntimeError:  # no folder for the cache
        return numba.njit(nogil=True, **OPTIONS, **pipeline())(named)


def run_by_address(state: Any, setup: Any, chunk: Any, more: bool) -> None:
    """:func:`.loop.run` on the addresses of what it is given; ``run`` and ``by_address`` are names that only machine
    code has."""
    run(by_address(state), by_address(setup), by_address(chunk), more)  # type: ignore[name-defined] # noqa: F821


def with_own(form_batch: Callable[..., Any] | None, route: Callable[..., Any] | None) -> Callable[..., None]:
    """:func:`.loop.run` in plain Python with a policy, a router or both of a user's own in place of ours."""
    replaced = {} if form_batch is None else {"form_batch": form_batch}
    replaced |= {} if route is None else {"route": route}
    space = _with(loop, replaced | {name: _with(moving, replaced)[name] for name in ("move", "start_moves", "land")})
    return space["run"]


def _with(module: types.ModuleType, replaced: dict[str, Any]) -> dict[str, Any]:
    """The names of a module, its functions seeing ``replaced`` names in place of those they were written with."""
    space = dict(vars(module))
    for name, function in vars(module).items():
        if inspect.isfunction(function) and function.__module__ == module.__name__:
            space[name] = types.FunctionType(function.__code__, space, name)
    space |= replaced
    return space


def on_disk() -> bool:
    """Whether the machine code of these sources is kept on disk."""
    folder = Path(__file__).with_name("__pycache__")
    return any(folder.glob(f"compiled.run_{source_hash()}-*.nbi"))


@lru_cache
def source_hash() -> str:
    """A short hash of the sources of all that is compiled."""
    text = "".join(inspect.getsource(module) for module in (*PARTS, policies, chain, loop)) + repr(
        (OPTIONS, POLICIES, ROUTERS)
    )
    text += "".join(Path(__file__).with_name(name).read_text(encoding="utf-8") for name in NUMBA_OWN)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
