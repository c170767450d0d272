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

from . import (
    blocks,
    due,
    histogram,
    iteration,
    lanes,
    loop,
    moving,
    policies,
    queues,
    repeating,
    routing,
    rules,
    sglang,
    state,
)

PARTS = (iteration, histogram, rules, lanes, due, blocks, queues, sglang, policies, repeating, routing, moving, state)
PLAIN = {"empty_state", "with_room", "linear_tables", "tree_of"}  # numpy of their own, never called by the loop
OPTIONS: dict[str, Any] = {"_nrt": False, "error_model": "numpy"}
"""Nothing is allocated inside, so that no reference is counted: each call would count all arrays of the state."""
INLINE: tuple[Callable[..., Any], ...] = (
    *(loop.next_arrival, loop.finish, loop.give_tokens, loop.note_gap, loop.kick, loop.form_batches, loop.form),
    *(loop.start, loop.batch_us, loop.count_size, loop.note, histogram.bin_of, lanes.set_end, lanes.next_end),
    *(iteration.iteration_us, iteration.at_point, iteration.at_points, iteration.piece_of),
    *(rules.rules_of, rules.ranks_of, rules.first_rank, rules.first_decode_rank),
    *(repeating.repeat, repeating.undisturbed, repeating.look_ahead, repeating.begin, repeating.catch_up),
    *(queues.put, queues.rest, queues.decoding, queues.first_waiting, queues.make_room, blocks.grow, blocks.missing),
)
"""What every iteration calls stands where it is called: a call would copy the state's arrays, hundreds of words."""


@lru_cache
def compiled() -> Callable[..., None]:
    """:func:`.loop.run` as machine code, or as it stands without numba."""
    if importlib.util.find_spec("numba") is None:
        return loop.run
    import numba

    for part in (*PARTS, loop):
        for name, each in vars(part).items():
            if inspect.isfunction(each) and each.__module__ == part.__name__ and name not in PLAIN and name[0] != "_":
                numba.extending.register_jitable(**OPTIONS, forceinline=each in INLINE)(each)
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
    text = "".join(inspect.getsource(part) for part in (*PARTS, loop)) + repr(
        (OPTIONS, [each.__name__ for each in INLINE])
    )
    return hashlib.sha256(text.encode()).hexdigest()[:12]
