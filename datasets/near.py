"""Which of the known names a mistyped one means: one order for every message that asks "did you mean …?"."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

ALIKE, ALIKE_SHORT = 0.55, 0.5  # of difflib's ratio, from which on two names are near; of three letters or fewer
LEAST = 2  # characters of a beginning that tell something


def likeliest(name: object, known: Iterable[str], most: int = 3) -> list[str]:
    """The known names that are meant most likely, the likeliest first; [] where none is near.

    First those that have the name as one of their words, then those with a word that begins so (``h10``: ``h100_sxm``,
    not ``a10``), then those that hold it anywhere, then those that look alike.
    """
    names = list(dict.fromkeys(map(str, known)))
    asked = _plain(str(name))
    ranked = sorted((rank, at) for at, each in enumerate(names) if (rank := _rank(asked, each)) is not None)
    found = [names[at] for _, at in ranked]
    lower = {each.lower(): each for each in reversed(names)}
    least = ALIKE if len(asked) > 3 else ALIKE_SHORT
    found += [lower[each] for each in difflib.get_close_matches(str(name).lower(), lower, most, least)]
    return list(dict.fromkeys(found))[:most]


def _rank(asked: str, name: str) -> int | None:
    """How much of a name was asked for: 0 all, 1 a word of it, 2 how a word begins, 3 a part; None for nothing."""
    whole, words = _plain(name), re.split(r"[^a-z0-9]+", name.lower())
    if asked == whole:
        return 0
    if len(asked) < LEAST:
        return None
    if asked in words:
        return 1
    if any(each.startswith(asked) for each in (*words, whole)):
        return 2
    return 3 if len(asked) > LEAST and asked in whole else None


def likeliest_setting(name: str, known: Iterable[str], most: int = 3) -> list[str]:
    """The settings that a name may mean: of the same name in a group, near ones beside it, near ones in groups."""
    parent, _, own = name.rpartition(".")
    parts = {each: each.rpartition(".") for each in known}
    beside = {last: each for each, (group, _, last) in parts.items() if group == parent}
    elsewhere = [each for each, (group, *_) in parts.items() if group != parent]
    inside = likeliest(own, [parts[each][2] for each in elsewhere], 1)
    found = [each for each in elsewhere if parts[each][2] == own]
    found += [beside[last] for last in likeliest(own, beside, most)]
    found += likeliest(name, [each for each in elsewhere if each.count(".") == name.count(".")], most)
    found += [each for each in elsewhere if parts[each][2] in inside]
    return list(dict.fromkeys(found))[:most]


def question(names: Sequence[str]) -> str:
    """``did you mean a or b?``; nothing of no names."""
    return f"did you mean {' or '.join(names)}?" if names else ""


def did_you_mean(name: object, known: Iterable[str], otherwise: str = "", most: int = 3) -> str:
    """``did you mean a or b?``; ``otherwise`` where no name is near."""
    return question(likeliest(name, known, most)) or otherwise


def meant(name: object, known: Iterable[str], most: int = 1) -> str:
    """The word that was meant, as the end of a sentence: ``; did you mean a?``. Nothing where none is near."""
    said = did_you_mean(name, known, most=most)
    return f"; {said}" if said else ""


def _plain(text: str) -> str:
    """A name without what people write in different ways: case, underscores, hyphens."""
    return re.sub(r"[^a-z0-9.]", "", text.lower())
