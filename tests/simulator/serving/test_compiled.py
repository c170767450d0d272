"""What machine code of the event loop is made of, without compiling it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from opcast.simulator.serving import compiled, loop


def compiled_functions() -> dict[str, Callable[..., Any]]:
    """Functions that are told to numba, by module and name."""
    return {
        f"{module.__name__}.{name}": function
        for module in (*compiled.PARTS, loop)
        for name, function in vars(module).items()
        if inspect.isfunction(function) and function.__module__ == module.__name__ and name not in compiled.PLAIN
    }


def test_all_that_the_loop_calls_is_compiled() -> None:
    known = compiled_functions()
    links = {link for chain in compiled.CHAINS for link in chain}
    seen, waiting = set(), [loop.run]
    while waiting:
        function = waiting.pop()
        if function in seen:
            continue
        seen.add(function)
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        names = [function.__globals__.get(name) for name in function.__code__.co_names]
        for called in filter(inspect.isfunction, (*names, *cells)):
            name = f"{called.__module__}.{called.__name__}"
            assert name in known or called in links, f"{name}, called by {function.__name__}, is not in PARTS"
            waiting.append(called)
    assert len(seen) > 100
