"""Tables inside the documents that are made from the code, between marks such as ``<!-- options -->``.

    python docs/blocks.py          # which pages differ; --write puts the tables there

A test holds that no page says anything else. What a whole page says of the code is in ``reference.py``.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path

from opcast.jobs import cli
from opcast.simulator.passes.zero import stages
from opcast.simulator.question import options
from opcast.simulator.serving import policies, routing
from opcast.simulator.timing import modifiers

DOCS = Path(__file__).resolve().parent
HOW = {  # a verb -> the page on it, where that has another name
    "quickstart": "first-run.md",
    "profile": "measuring.md",
    "import": "importing.md",
    "data": "campaigns.md",
    "train": "predictors.md",
    "onboard": "campaigns.md#a-new-device-in-one-command",
    "predict": "tutorial.md",
    "simulate": "clusters.md",
    "compare": "chips.md",
    "validate": "validation.md",
    "calibrate": "validation.md#calibration",
    "trace": "traces.md",
    "posttrain": "post-training.md",
    "upgrade": "upgrades.md",
    "new": "clusters.md#hardware-that-is-not-in-the-list",
    "list": "limits.md",
    "sweep": "plan.md#many-jobs-at-once",
    "completion": "install.md",
}


def rows(heads: tuple[str, str], said: Mapping[str, str]) -> str:
    """A table of names and what is said of each, as a row each."""
    cells = {name: " ".join(text.replace("``", "`").split()) for name, text in said.items()}
    lines = [f"| {' | '.join(heads)} |", "| --- | --- |"]
    return "\n".join([*lines, *(f"| `{name}` | {text} |" for name, text in cells.items())])


def policies_table() -> str:
    """What each policy of a scheduler does, by its module."""
    docs = {name: str(import_module(f"{policies.__name__}.{name}").__doc__) for name in policies.POLICIES}
    return rows(
        ("`scheduler.policy`", "in each iteration"), {name: text.split("\n\n")[0] for name, text in docs.items()}
    )


def routers_table() -> str:
    """Which rank each router chooses, by its function."""
    docs = {name: inspect.getdoc(each.choose) or "" for name, each in routing.TABLE.items()}
    return rows(("`router`", "the rank of a request"), docs)


def verbs_table() -> str:
    """What each verb does, as its help says, with the page on it."""
    lines = ["| verb | what it does | page |", "| --- | --- | --- |"]
    for verb, (_, what) in cli.VERBS.items():
        page = HOW.get(verb, f"{verb}.md")
        link = (
            f"[{page.partition('#')[0].removesuffix('.md')}]({page})"
            if (DOCS / page.partition("#")[0]).exists()
            else ""
        )
        lines.append(f"| `opcast {verb}` | {what} | {link} |")
    return "\n".join(lines)


BLOCKS: Mapping[str, Callable[[], str]] = {
    "options": options.table,
    "zero stages": stages.table,
    "modifiers": modifiers.table,
    "policies": policies_table,
    "routers": routers_table,
    "verbs": verbs_table,
}


def filled(text: str) -> str:
    """A page with the tables of the code between their marks."""
    for name, table in BLOCKS.items():
        if f"<!-- {name} -->" in text:
            marked = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
            said = table()
            text = marked.sub(lambda found, said=said: f"{found[1]}{said}\n{found[2]}", text)
    return text


def main() -> int:
    """Say which pages differ, or write them."""
    differ = [path for path in sorted(DOCS.glob("*.md")) if filled(path.read_text("utf-8")) != path.read_text("utf-8")]
    for path in differ:
        print(path.name)
        if "--write" in sys.argv[1:]:
            path.write_text(filled(path.read_text("utf-8")), "utf-8")
    return 0 if "--write" in sys.argv[1:] else len(differ)


if __name__ == "__main__":
    sys.exit(main())
