"""What the code binds most often is called by nouns of the field: bare participles and grammar words do not come back.

A name such as ``found`` or ``each`` says nothing of what it holds. :data:`LIMITS` has, room by room, how many bindings
in a hundred may be such words: what a room had when it was last gone through, so that its share can only fall. After
renaming, ``python tests/test_names.py`` prints the shares and the most frequent names of every room.
"""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
GRAMMAR = frozenset(
    (
        *("found", "made", "each", "own", "place", "known", "part", "wanted", "told", "taken", "kept", "given"),
        *("held", "left", "drawn", "shown", "asked", "seen", "said", "read", "whole", "rest"),
    )
)
LIMITS = {  # bindings of these words in a hundred
    "datasets": 0.5,
    "harness": 0.5,
    "jobs": 2.3,
    "models": 0.8,
    "simulator": 1.5,
    "simulator/chips": 0.0,
    "simulator/upgrade": 0.0,
    "simulator/contention": 1.4,
    "simulator/engines": 0.4,
    "simulator/execution": 0.7,
    "simulator/formats": 0.4,
    "simulator/html": 1.1,
    "simulator/job": 0.0,
    "simulator/memory": 0.7,
    "simulator/network": 0.6,
    "simulator/passes": 0.5,
    "simulator/post_training": 0.0,
    "simulator/predict": 1.4,
    "simulator/question": 1.5,
    "simulator/report": 0.9,
    "simulator/search": 0.7,
    "simulator/serving": 0.7,
    "simulator/step": 0.6,
    "simulator/timing": 0.7,
    "simulator/trace": 0.1,
    "simulator/validation": 0.6,
}


def bindings(tree: ast.AST) -> Iterator[str]:
    """The names that a module binds: variables, parameters, functions, classes, imports under another name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.alias) and node.asname:
            yield node.asname


def room_of(path: Path) -> str:
    """The room of a module: its folder at the top, or inside ``simulator`` the folder in there."""
    parts = path.relative_to(ROOT).parts[:-1]
    return "/".join(parts[: 2 if parts[0] == "simulator" else 1])


@pytest.fixture(scope="module")
def names() -> dict[str, Counter[str]]:
    return names_by_room()


def names_by_room() -> dict[str, Counter[str]]:
    """How often each room binds each name."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for top in ("datasets", "harness", "models", "simulator", "jobs"):
        for path in sorted((ROOT / top).rglob("*.py")):
            counts[room_of(path)].update(bindings(ast.parse(path.read_text(encoding="utf-8"))))
    return counts


def share(counts: Counter[str]) -> float:
    """Bindings of grammar words in a hundred."""
    return 100 * sum(counts[word] for word in GRAMMAR) / counts.total()


def test_every_room_has_a_limit(names: dict[str, Counter[str]]) -> None:
    assert set(names) == set(LIMITS)


@pytest.mark.parametrize("room", LIMITS)
def test_names_say_what_they_hold(room: str, names: dict[str, Counter[str]]) -> None:
    frequent = [f"{word} ({count})" for word, count in names[room].most_common() if word in GRAMMAR]
    assert share(names[room]) <= LIMITS[room], f"{room} binds {', '.join(frequent)}: name what they hold"


def test_what_binds_a_name_is_counted() -> None:
    code = "import a as found\ndef made(each, *own):\n    for place, (known, x) in own: part: int = (wanted := 1)"
    assert sorted(bindings(ast.parse(code))) == sorted(
        ["found", "made", "each", "own", "place", "known", "x", "part", "wanted"]
    )


if __name__ == "__main__":
    for room, counts in sorted(names_by_room().items()):
        print(f'    "{room}": {share(counts):.2f},  # {", ".join(name for name, _ in counts.most_common(8))}')
