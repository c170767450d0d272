"""The event loop as machine code: numba, kept on disk; as plain Python where numba is not installed.

All functions of the loop are compiled as one; what is kept on disk is known by a hash of their sources, so that a
change in any of their modules is seen.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import types
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from . import blocks, due, histogram, iteration, lanes, loop, moving, policies, queues, repeating, routing, rules, state

PARTS = (iteration, histogram, rules, lanes, due, blocks, queues, policies, repeating, routing, moving, state)
PLAIN = {"empty_state", "with_room", "linear_tables", "tree_of"}  # numpy of their own, never called by the loop
INLINE = set(
    "next_arrival finish give_tokens note_gap kick form_batches form repeat undisturbed start batch_us iteration_us "
    "at_point at_points piece_of count_size note bin_of first_waiting put rest decoding make_room grow missing look_ahead begin catch_up "
    "set_end next_end rules_of ranks_of first_rank first_decode_rank".split()
)
OPTIONS: dict[str, Any] = {"_nrt": False, "error_model": "numpy"}
"""Nothing is allocated inside, so that no reference is counted: each call would count all arrays of the state."""


@lru_cache
def compiled() -> Callable[..., None]:
    """:func:`.loop.run` as machine code, or as it stands without numba."""
    if importlib.util.find_spec("numba") is None:
        return loop.run
    import numba

    for part in (*PARTS, loop):
        for name, each in vars(part).items():
            if inspect.isfunction(each) and each.__module__ == part.__name__ and name not in PLAIN and name[0] != "_":
                numba.extending.register_jitable(**OPTIONS, forceinline=name in INLINE)(each)
    named = types.FunctionType(loop.run.__code__, loop.run.__globals__, "run")
    named.__qualname__ = f"run_{source_hash()}"
    try:
        return numba.njit(cache=True, nogil=True, **OPTIONS)(named)
    except RuntimeError:  # no folder for the cache
        return numba.njit(nogil=True, **OPTIONS)(named)


def with_own(form_batch: Callable[..., Any] | None, route: Callable[..., Any] | None) -> Callable[..., None]:
    """:func:`.loop.run` in plain Python with a policy, a router or both of a user's own in place of ours."""
    own = {} if form_batch is None else {"form_batch": form_batch}
    own |= {} if route is None else {"route": route}
    space = _with(loop, own | {name: _with(moving, own)[name] for name in ("move", "start_moves", "land")})
    run: Callable[..., None] = space["run"]
    return run


def _with(part: types.ModuleType, own: dict[str, Any]) -> dict[str, Any]:
    """The names of a module, its functions seeing ``own`` names in place of those they were written with."""
    space = dict(vars(part))
    for name, each in vars(part).items():
        if inspect.isfunction(each) and each.__module__ == part.__name__:
            space[name] = types.FunctionType(each.__code__, space, name)
    space |= own
    return space


def on_disk() -> bool:
    """Whether the machine code of these sources is kept on disk."""
    from pathlib import Path

    folder = Path(loop.__file__).with_name("__pycache__")
    return any(folder.glob(f"loop.run_{source_hash()}-*.nbi"))


@lru_cache
def source_hash() -> str:
    """A short hash of the sources of all that is compiled."""
    text = "".join(inspect.getsource(part) for part in (*PARTS, loop))
    return hashlib.sha256(text.encode()).hexdigest()[:12]
