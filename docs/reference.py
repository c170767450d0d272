"""Pages of the documentation site that are made from the code, so that they cannot say anything else.

A hook of mkdocs (``mkdocs.yml``). The home page is the README; links that leave ``docs/`` become the path's name,
because the site holds the documents alone. Tables inside of other pages are in ``blocks.py``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OF_THE_ROOT = {
    "CHANGELOG.md": "reference/changes.md",
    "CONTRIBUTING.md": "reference/contributing.md",
    "SECURITY.md": "reference/security.md",
}
LISTINGS = ("devices", "clusters", "models", "stacks", "precisions", "figures")  # of `opcast list`
SCHEMES = ("http:", "https:", "mailto:", "#")
NOWHERE = ROOT / "docs" / "nowhere"  # no store and no predictors but those that come with opcast


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that no file holds."""
    from mkdocs.structure.files import File

    made = {
        "index.md": (ROOT / "README.md").read_text(encoding="utf-8"),
        **{page: (ROOT / file).read_text(encoding="utf-8") for file, page in OF_THE_ROOT.items()},
        "reference/verbs.md": verbs(),
        "reference/ops.md": ops(),
        "reference/python.md": python(),
        "reference/columns.md": columns(),
        "reference/chip-answers.md": chips(),
        **{f"examples/{path.stem}.md": notebook(path) for path in sorted((ROOT / "docs" / "examples").glob("*.ipynb"))},
        **{f"reference/{what}.md": listing(what) for what in LISTINGS},
    }
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links as the site has them: README's lead to ``docs/``, those to other files of the repository are its names."""
    from posixpath import dirname, join, normpath

    here = dirname(page.file.src_uri)
    base = "" if page.file.src_uri in ("index.md", *OF_THE_ROOT.values()) else "docs"

    def link(match: re.Match[str]) -> str:
        mark_of, text, target = match[1], match[2], match[3]
        if target.startswith(SCHEMES):
            return match[0]
        path, mark, anchor = target.partition("#")
        place = normpath(join(base, here if base else "", path))
        if mark_of == "!":
            return f"![{text}]({'../' if here else ''}{place.removeprefix('docs/')})"
        if place == "README.md":
            return f"[{text}]({'../' * here.count('/') + ('../' if here else '')}index.md{mark}{anchor})"
        if place in OF_THE_ROOT:
            return f"[{text}]({'../' if here else ''}{OF_THE_ROOT[place]}{mark}{anchor})"
        if place.startswith("docs/"):
            page = re.sub(r"\.ipynb$", ".md", place.removeprefix("docs/"))
            return f"[{text}]({'../' if here else ''}{page}{mark}{anchor})"
        return f"{text} (`{place}`)"

    return re.sub(r"(!?)\[([^\]]+)\]\(([^)\s]+)\)", link, markdown)


def notebook(path: Path) -> str:
    """A notebook as a page: its text, its code, and what the code printed when it was last run."""
    import json

    lines = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        lines += [text, ""] if cell["cell_type"] == "markdown" else ["```python", text, "```", ""]
        for output in cell.get("outputs", ()):
            said = output.get("text") or output.get("data", {}).get("text/plain") or []
            lines += ["```text", "".join(said).rstrip(), "```", ""] if said else []
    return "\n".join([*lines, f"The notebook: `docs/examples/{path.name}`.", ""])


def verbs() -> str:
    """Every verb with its help."""
    from opcast.jobs import helping
    from opcast.jobs.cli import PAIRS, VERBS

    lines = ["# Verbs and settings", "", "What `opcast VERB --help=all` prints.", ""]
    for verb, (_, what) in VERBS.items():
        lines += [f"## opcast {verb}", "", f"{what[0].upper()}{what[1:]}.", ""]
        lines += ["```text", helping.help_of(verb, group=helping.ALL), "```", ""]
        for words, pair in PAIRS.items():
            if words[0] == verb:
                lines += [
                    f"### opcast {' '.join(words)}",
                    "",
                    "```text",
                    helping.help_of(pair, group=helping.ALL),
                    "```",
                    "",
                ]
    return "\n".join(lines)


def ops() -> str:
    """Every op kind with its dims."""
    from opcast.datasets.ops import KINDS

    lines = [
        "# Ops",
        "",
        "The kinds of operators, their dims, and what they compute. `opcast list ops` prints them.",
        "",
    ]
    for name, kind in KINDS.items():
        lines += [f"## {name}", "", plain(kind.doc), "", "| dim | default | values | is |", "| --- | --- | --- | --- |"]
        for dim in kind.dims:
            default = "needed" if dim.default is None else dim.choices[dim.default] if dim.choices else dim.default
            values = " ".join(dim.choices) or f"from {dim.low}"
            lines.append(f"| `{dim.name}` | {default} | {values} | {plain(dim.help)} |")
        lines.append("")
    return "\n".join(lines)


def listing(what: str) -> str:
    """What ``opcast list`` prints, as a page."""
    from opcast.jobs import listing as listings

    heads, rows = getattr(listings, what)({"store": str(NOWHERE), "predictors": str(NOWHERE)})
    lines = [f"# {what.capitalize()}", "", f"What `opcast list {what}` prints.", ""]
    lines += ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    lines += ["| " + " | ".join("" if cell is None else plain(str(cell)) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def chips() -> str:
    """Which chips, and how well: a row a chip, a column a kind of op and format."""
    from opcast.datasets.devices import known_devices, load_device
    from opcast.jobs import resolve
    from opcast.simulator.predict.chips import QUESTIONS, chip_answers

    lines = [
        "# Which chips, and how well",
        "",
        "Who answers when one op of a kind is asked with what ships with opcast, and the median error of such answers.",
        "`opcast list chips chip=NAME` prints it for one chip, with yours in your store counted in.",
        "",
        "- **learned**: from timings on this very chip. The error is that of shapes that were held out.",
        "- **kin**: from timings of the nearest chips. The error is what they missed of chips that were left out;",
        "  where there is none, another format or a kind of op that is like it answers.",
        "- **physics**: rates, bandwidths and launches alone. Nine in ten answers are within a factor of three.",
        "",
        "The factor after × is how far the 90 % interval of one usual op of the kind reaches up.",
        "",
    ]
    registries = resolve.registries({"predictors": str(NOWHERE)})
    devices = [device for device in map(load_device, known_devices()) if not device.synchronous]
    answers: dict[str, dict[tuple[str, str], Any]] = {device.id: {} for device in devices}
    for answer in chip_answers(devices, [NOWHERE], registries):
        answers[answer.device][answer.label, answer.dtype] = answer
    for label in dict.fromkeys(question.label for question in QUESTIONS):
        dtypes = sorted({dtype for chip in answers.values() for of, dtype in chip if of == label})
        lines += [
            f"## {label.capitalize()}",
            "",
            "| chip | " + " | ".join(dtypes) + " |",
            "|" + " --- |" * (len(dtypes) + 1),
        ]
        for name, chip in answers.items():
            cells = [chip_cell(chip.get((label, dtype))) for dtype in dtypes]
            lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def chip_cell(answer: Any) -> str:
    """One answer in a few words."""
    if answer is None:
        return ""
    error = "" if answer.error_percent is None else f" {answer.error_percent:.1f} %"
    return f"{answer.how}{error}, × {answer.factor:.1f}"


def columns() -> str:
    """The columns of a measurement."""
    from dataclasses import fields

    from opcast.datasets.schema import Measurement

    lines = ["# Columns of the store", "", plain(Measurement.__doc__ or ""), "", "| column | type |", "| --- | --- |"]
    return "\n".join([*lines, *(f"| `{each.name}` | `{plain(str(each.type))}` |" for each in fields(Measurement))])


def python() -> str:
    """The public names, with their signatures and docstrings."""
    import inspect

    import opcast

    lines = ["# Python", "", "The names of `import opcast`.", ""]
    for name in opcast.__all__:
        value = getattr(opcast, name)
        if name.startswith("_"):
            continue
        lines += [f"## {name}", "", "```python", signature(name, value), "```", "", prose(value), ""]
        for part, method in vars(value).items() if inspect.isclass(value) else ():
            method = method.fget if isinstance(method, property) else getattr(method, "__func__", method)
            if not part.startswith("_") and inspect.isfunction(method) and method.__doc__:
                lines += [f"`{name}.{part}`", f":   {plain(method.__doc__.strip().splitlines()[0])}", ""]
    return "\n".join(lines)


def signature(name: str, value: Any) -> str:
    """A call as it is written, an argument a line."""
    import inspect

    said = inspect.signature(value)
    parts = [f"    {each}," for each in said.parameters.values()]
    returned = "" if said.return_annotation in (said.empty, None) else f" -> {said.return_annotation}"
    return f"{name}(\n" + "\n".join(parts) + f"\n){returned}" if parts else f"{name}(){returned}"


def prose(value: Any) -> str:
    """A docstring as text of a page."""
    import inspect

    return (inspect.getdoc(value) or "").replace("``", "`")


def plain(text: str) -> str:
    """Text of a docstring as a line of a table may hold it."""
    return " ".join(text.replace("``", "`").replace("|", "\\|").split())


sys.dont_write_bytecode = True
