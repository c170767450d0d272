"""The forms of the page, as data: which settings a tab shows first, and all others from the one declaration.

What a setting is, its default, help and who takes it comes from :func:`..questions.settings`; ``page/forms.yaml`` has
only the order of the fields that are shown first, the words beside them, and the values of the example.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Union, get_args, get_origin

from ...datasets.reading import read_yaml
from ...simulator.question.declaration import RequestSetting, dataclass_in, plain_default
from ..questions import CHOSEN_BY_NAME, settings
from ..show import BadInputError

LISTS = {"model": "models", "device": "devices", "cluster": "clusters", "stack": "stacks", "precision": "precisions"}
CHOICES = re.compile(r"(?:^|: )([\w-]+(?: \| [\w-]+)+)(?![\w|])")  # as helps spell what a text may be
UNIONS = (Union, types.UnionType)
PLAIN = {int: "integer", float: "number", bool: "flag", str: "text"}
SHOWN: Mapping[str, Any] = read_yaml(Path(__file__).resolve().parent / "page" / "forms.yaml", BadInputError)
LABELS: Mapping[str, str] = SHOWN["labels"]
FORMS: Sequence[Mapping[str, Any]] = SHOWN["forms"]


def forms() -> list[dict[str, Any]]:
    """All forms as the page's script reads them: fields shown first by group, then all other settings of the verb."""
    return [_form(form) for form in FORMS]


def _form(form: Mapping[str, Any]) -> dict[str, Any]:
    entries = {entry["name"]: entry for entry in fields_of(settings(form["verb"]))}
    first_names = {name for names in form["groups"].values() for name in names}
    for name in first_names & form["example"].keys():
        entries[name]["usual"] = form["example"][name]
    groups = [{"legend": key, "fields": [entries[name] for name in names]} for key, names in form["groups"].items()]
    more = [entry for name, entry in entries.items() if name not in first_names]
    return {**{key: form[key] for key in ("id", "verb", "title", "lead")}, "groups": groups, "more": more}


def fields_of(declared: Sequence[RequestSetting], name: str = "", path: str = "") -> Iterator[dict[str, Any]]:
    """A field for each setting that HTTP takes, those within a mapping by names with dots."""
    for setting in declared:
        if setting.http:
            continue
        full = f"{name}.{setting.name}" if name else setting.name
        at = f"{path}.{setting.path}" if path else CHOSEN_BY_NAME.get(setting.name, setting.path)
        single = get_origin(setting.kind) is not tuple
        if setting.inside and single and not setting.chosen and not _optional(setting.kind):
            yield from fields_of(setting.inside, full, at)
            continue
        kind, listed = ("text", False) if full in LISTS else kind_of(setting.kind)
        yield {
            "name": full,
            "path": at,
            "label": LABELS.get(full)
            or LABELS.get(setting.name)
            or full.removeprefix("space.").replace(".", " ").replace("_", " "),
            "help": setting.help,
            "kind": kind,
            "list": listed,
            "names": LISTS.get(full),
            "choices": choices_of(setting.help) if kind == "text" else [],
            "default": plain_default(setting.default),
            "of": list(setting.of),
        }


def _optional(kind: Any) -> bool:
    return dataclass_in(kind) is not None and type(None) in get_args(kind)


def kind_of(kind: Any) -> tuple[str, bool]:
    """What a field takes (``integer``, ``number``, ``flag``, ``text`` or ``json``), and whether a list of it."""
    if kind is Any:
        return "text", False
    if kind in PLAIN:
        return PLAIN[kind], False
    inner = [argument for argument in get_args(kind) if argument not in (type(None), Ellipsis)]
    if get_origin(kind) is tuple:
        return (PLAIN[inner[0]], True) if inner[0] in PLAIN else ("json", False)
    if str in inner and get_origin(kind) in UNIONS:
        return "text", False
    return kind_of(inner[0]) if len(inner) == 1 and get_origin(kind) in UNIONS else ("json", False)


def choices_of(text: str) -> list[str]:
    """What a text may be, where its help lists that."""
    match = CHOICES.search(text)
    return match[1].split(" | ") if match else []
