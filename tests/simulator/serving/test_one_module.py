"""Functions compiled as one: the outermost runs, its parts can be linked elsewhere, others compile as usual."""

from __future__ import annotations

import pytest

numba = pytest.importorskip("numba")
from opcast.simulator.serving.one_module import PartLibrary, pipeline  # noqa: E402


@numba.extending.register_jitable(_nrt=False)
def doubled(number: int) -> int:
    return 2 * number


@numba.extending.register_jitable(_nrt=False)
def doubled_and_one(number: int) -> int:
    return doubled(number) + 1


def outermost(number: int) -> int:
    return doubled_and_one(number) + doubled(number)


def test_this_release_of_numba_has_what_is_needed() -> None:
    assert pipeline()


def test_the_outermost_runs_and_others_are_as_ever() -> None:
    whole = numba.njit(_nrt=False, **pipeline())(outermost)
    assert whole(10) == 41
    usual = numba.njit(outermost)  # links the same parts, under numba's own compiler
    assert usual(11) == 45
    assert numba.njit(lambda number: number + 1)(1) == 2
    overload = whole.overloads[whole.signatures[0]]
    assert not isinstance(overload.library, PartLibrary)
    parts = [library for library in overload.library._linking_libraries if isinstance(library, PartLibrary)]
    assert len(parts) == 2


def test_what_cannot_be_compiled_leaves_the_usual_compiler_in_place() -> None:
    def broken(number: int) -> int:
        return doubled(number) + number.nothing  # type: ignore[attr-defined]

    with pytest.raises(numba.core.errors.TypingError):
        numba.njit(_nrt=False, **pipeline())(broken)(1)
    assert numba.njit(lambda number: number + 3)(1) == 4
