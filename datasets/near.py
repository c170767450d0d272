"""Which of the known names a mistyped one means: one order for every message that asks "did you mean …?"."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

ALIKE, ALIKE_SHORT = 0.55, 0.5  # of difflib's ratio, from which on two names are near; of three letters or fewer
LEAST = 2  # characters of a beginning that tell something


def likeliest(name: object, choices: Iterable[str], most: int = 3) -> list[str]:
    """The known names that are meant most likely, the likeliest first; [] where none is near.

    First those that have the name as one of their words, then those with a word that begins so (``h10``: ``h100_sxm``,
    not ``a10``), then those that hold it anywhere, then those that look alike.
    """
    names = list(dict.fromkeys(map(str, choices)))
    typed = _plain(str(name))
    ranked = sorted((rank, at) for at, choice in enumerate(names) if (rank := _rank(typed, choice)) is not None)
    nearest = [names[at] for _, at in ranked]
    lower = {choice.lower(): choice for choice in reversed(names)}
    least = ALIKE if len(typed) > 3 else ALIKE_SHORT
    nearest += [lower[choice] for choice in difflib.get_close_matches(str(name).lower(), lower, most, least)]
    return list(dict.fromkeys(nearest))[:most]


def _rank(typed: str, name: str) -> int | None:
    """How much of a name was asked for: 0 all, 1 a word of it, 2 how a word begins, 3 a part; None for nothing."""
    plain_name, words = _plain(name), re.split(r"[^a-z0-9]+", name.lower())
    if typed == plain_name:
        return 0
    if len(typed) < LEAST:
        return None
    if typed in words:
        return 1
    if any(word.startswith(typed) for word in (*words, plain_name)):
        return 2
    return 3 if len(typed) > LEAST and typed in plain_name else None


def likeliest_setting(name: str, choices: Iterable[str], most: int = 3) -> list[str]:
    """The settings that a name may mean: of the same name in a group, near ones beside it, near ones in groups."""
    parent, _, leaf = name.rpartition(".")
    parts = {choice: choice.rpartition(".") for choice in choices}
    beside = {last: choice for choice, (group, _, last) in parts.items() if group == parent}
    elsewhere = [choice for choice, (group, *_) in parts.items() if group != parent]
    inside = likeliest(leaf, [parts[choice][2] for choice in elsewhere], 1)
    same_leaf = [choice for choice in elsewhere if parts[choice][2] == leaf]
    same_leaf += [beside[last] for last in likeliest(leaf, beside, most)]
    same_leaf += likeliest(name, [choice for choice in elsewhere if choice.count(".") == name.count(".")], most)
    same_leaf += [choice for choice in elsewhere if parts[choice][2] in inside]
    return list(dict.fromkeys(same_leaf))[:most]


def question(names: Sequence[str]) -> str:
    """``did you mean a or b?``; nothing of no names."""
    return f"did you mean {' or '.join(names)}?" if names else ""


def did_you_mean(name: object, choices: Iterable[str], otherwise: str = "", most: int = 3) -> str:
    """``did you mean a or b?``; ``otherwise`` where no name is near."""
    return question(likeliest(name, choices, most)) or otherwise


def meant(name: object, choices: Iterable[str], most: int = 1) -> str:
    """The word that was meant, as the end of a sentence: ``; did you mean a?``. Nothing where none is near."""
    hint = did_you_mean(name, choices, most=most)
    return f"; {hint}" if hint else ""


def _plain(text: str) -> str:
    """A name without what people write in different ways: case, underscores, hyphens."""
    return re.sub(r"[^a-z0-9.]", "", text.lower())
