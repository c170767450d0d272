"""What ``opcast`` and ``opcast VERB --help`` print: the verbs by what people come for, and a verb's own settings.

The settings are the verb's file in ``conf/`` as it is written, comments and all, so that help and configuration
cannot differ. A group's many choices are counted, not listed: ``opcast list`` and completion have them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..datasets.counts import counted
from ..datasets.loading import nearest
from ..datasets.ops import KINDS
from ..datasets.version import __version__
from ..simulator.question.declaration import RequestSetting, defaults_of
from .questions import CHOICES, of_choice, of_command
from .settings import command, read
from .show import CONFIG_DIRECTORY, BadInputError

WANTED = (
    ("the whole job on this machine, in a few minutes", "opcast quickstart"),
    ("how long does this operator take?", "opcast predict op=gemm op.m=4096 op.n=4096 op.k=4096 device=h100"),
    ("how long does a step of this model take?", "opcast simulate workload=train model=llama3_8b device=h200"),
    ("which layout is the best one?", "opcast search model=llama3_8b cluster=dgx_h100 workload.global_batch=64"),
    ("how many days and how much money is the whole job?", "opcast plan model=llama3_8b cluster=dgx_h100 tokens=1e12"),
    ("how fast is it under my traffic?", "opcast serving model=llama3_8b device=h100 traffic.rate=4"),
)
SECTIONS: dict[str, tuple[str, ...]] = {
    "Ask": ("predict", "simulate", "serving", "search", "plan", "posttrain", "compare", "upgrade", "sweep", "list"),
    "Measure and learn": ("quickstart", "new", "onboard", "profile", "import", "data", "train"),
    "Check and explain": ("validate", "calibrate", "trace"),
    "Share": ("api", "mcp", "completion"),
}
LISTED = {"device": "devices", "cluster": "clusters", "model": "models", "op": "ops", "stack": "stacks"}
"""Groups that have a list of their own: ``opcast list devices``."""
SHOWN = ("workload", "parallel", "space")
"""Groups whose usual choice is shown unasked: its settings are what people set."""
WIDTH = 80  # columns of what is no setting
WORDS = re.compile(r"(?:[^\s'\"]|'[^']*'|\"[^\"]*\")+")  # what is quoted stays whole
MOST = 12  # choices of a group that are all named
COMMENTS = 30  # the column that help begins at
EMPTY: Mapping[str, int] = {}
MOST_LINES = 230  # of help that nobody asked in full: above it, groups that say what they are for are one line each
ALL = "all"  # of `--help=all`: every setting


def usage(verbs: Mapping[str, tuple[str, str]]) -> str:
    """The text of ``opcast`` alone. ``verbs``: name -> (module, what it does)."""
    width = max(map(len, verbs))
    lines = [f"opcast {__version__}: how long will LLM training and inference take?", "", "What people come for:"]
    for question, answer in WANTED:
        lines += [f"  {question}", f"      {answer}"]
    for heading, names in {**SECTIONS, "More": _unnamed(verbs)}.items():
        lines += ["", f"{heading}:"] if names else []
        lines += [f"  {name:<{width}}  {verbs[name][1]}" for name in names]
    return "\n".join(
        [
            *lines,
            "",
            "usage: opcast VERB [name=value] …",
            "opcast VERB --help shows a verb's settings. format=json prints one JSON object.",
        ]
    )


def _unnamed(verbs: Iterable[str]) -> tuple[str, ...]:
    named = {name for names in SECTIONS.values() for name in names}
    return tuple(verb for verb in verbs if verb not in named)


def help_of(verb: str, words: Sequence[str] = (), group: str = "") -> str:
    """The text of ``opcast VERB --help``; ``words`` such as ``workload=decode`` also show what those choices set.

    The verb has a file ``conf/VERB.yaml``, whose ``hydra.help.header`` says what it does, with examples. Help of more
    than MOST_LINES has one line for each group of settings; ``group`` is ``all`` for every setting, or the name of one.
    BadInputError for another ``group``.
    """
    if group not in ("", ALL):
        return help_of_part(verb, group, words)
    text = _help(verb, words, {})
    if group == ALL or text.count("\n") < MOST_LINES:
        return text
    return _help(verb, words, folded_groups(verb))


def folded_groups(verb: str) -> dict[str, int]:
    """The groups of a verb's question that say what they are for, and how many settings each has."""
    return {
        setting.path: len(setting.inside)
        for setting in of_command(verb)
        if setting.help and any(within.help for within in setting.inside)
    }


def help_of_part(verb: str, group: str, words: Sequence[str] = ()) -> str:
    """The text of ``opcast VERB --help=PART``: a group of settings, or a group's choices and what one sets."""
    usual = chosen_groups(read(CONFIG_DIRECTORY / f"{verb}.yaml"))
    groups = [entry for entry in _nested(of_command(verb)) if isinstance(entry[1], dict) and entry[3]]
    if group in usual:
        choice = dict(word.split("=", 1) for word in words if "=" in word).get(group, usual[group])
        sections = [f"Choices:\n\n{_choices(group, usual[group])}"]
        if choice in choices(group):
            text = indent_lines(settings_of(group, choice))
            sections.append(f"Settings of {group}={choice}, as {group}.NAME=VALUE:\n\n{text}")
        return "\n\n".join(sections)
    for name, value, help_text, inside in groups:
        if name == group:
            text = indent_lines("\n".join(_lines(name, value, help_text, inside)))
            return f"Settings of {group}, as {group}.NAME=VALUE:\n\n{text}"
    raise BadInputError(
        f"`{command(verb)} --help=NAME` takes a group of settings; {nearest(group, parts(verb), 'one of')}"
    )


def parts(verb: str) -> list[str]:
    """What ``--help=`` takes: all, and every group of settings."""
    groups = [name for name, value, _, inside in _nested(of_command(verb)) if isinstance(value, dict) and inside]
    return [ALL, *groups, *chosen_groups(read(CONFIG_DIRECTORY / f"{verb}.yaml"))]


def _help(verb: str, words: Sequence[str], folded: Mapping[str, int]) -> str:
    """All of a verb's help, but for what is within the ``folded`` groups."""
    path = CONFIG_DIRECTORY / f"{verb}.yaml"
    config = read(path)
    groups = chosen_groups(config)
    named = dict(word.split("=", 1) for word in words if "=" in word)
    parts = [fold(config["hydra"]["help"]["header"].rstrip())]
    if groups:
        parts.append("Choices:\n\n" + "\n".join(_choices(group, usual) for group, usual in groups.items()))
    question = text_of(of_command(verb), folded)
    if question:
        parts.append(f"What is asked, with its defaults:\n\n{indent_lines(question)}")
    heading = "What becomes of the answer" if question else "Settings, with their defaults"
    parts.append(f"{heading}:\n\n{indent_lines(body(path))}")
    for group, usual in groups.items():
        choice = named.get(group, usual if group in SHOWN else None)
        if choice in choices(group):
            choice_text = indent_lines(settings_of(group, choice))
            parts.append(f"Settings of {group}={choice}, as {group}.NAME=VALUE:\n\n{choice_text}")
    parts.append(f"Settings that every verb has:\n\n{indent_lines(body(CONFIG_DIRECTORY / 'base.yaml'))}")
    if folded:
        groups_text = ", ".join(folded)
        parts.append(
            fold(
                f"`{command(verb)} --help=GROUP` shows the settings of a group ({groups_text}), "
                f"`{command(verb)} --help={ALL}` those of all."
            )
        )
    parts.append(
        fold(
            f"`{command(verb)} GROUP=CHOICE --help` shows the settings of that choice, too; `--cfg job` the "
            "configuration that a call makes; `a=1,2,3 --multirun` runs each value."
        )
    )
    return "\n\n".join(parts)


def fold(text: str) -> str:
    """The text in lines that a terminal has room for: a command goes on after a backslash, a sentence at a word."""
    return "\n".join(piece for line in text.splitlines() for piece in _folded(line))


def _folded(line: str) -> list[str]:
    if len(line) <= WIDTH:
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    command = indent and line.startswith("opcast ", len(indent))
    text, mark, comment = line.partition("  # ") if command else (line, "", "")
    lines, end = [indent.removesuffix(" ")], " \\" if command else ""
    for word in WORDS.findall(text) if command else text.split():
        if len(lines[-1]) + 1 + len(word) + len(end) > WIDTH:
            lines[-1] += end
            lines.append(f"{indent}   " if command else indent.removesuffix(" "))
        lines[-1] += f" {word}" if lines[-1] or indent else word
    return [*lines, f"{indent}    # {comment}"] if mark else lines


def chosen_groups(config: Mapping[str, Any]) -> dict[str, str | None]:
    """The groups of a verb and the choice each has when none is named."""
    entries = [entry for entry in config.get("defaults", ()) if isinstance(entry, dict)]
    return {
        str(group): None if choice is None else str(choice)
        for entry in entries
        for group, choice in entry.items()
        if not str(group).startswith("override ")
    }


def choices(group: str) -> list[str]:
    """The names that ``GROUP=`` takes."""
    if group == "op":
        from ..datasets.ops import KINDS

        return sorted(KINDS)
    return sorted({path.stem for path in (CONFIG_DIRECTORY / group).glob("*.yaml")} | CHOICES.get(group, {}).keys())


def settings_of(group: str, choice: str) -> str:
    """What ``GROUP=CHOICE`` sets, each with its default: the file as written, or the dims of an op."""
    if choice in CHOICES.get(group, {}):
        return text_of(of_choice(group, choice))
    if group != "op":
        return body(CONFIG_DIRECTORY / group / f"{choice}.yaml")
    kind = KINDS[choice]
    lines = [f"# {line}" for line in kind.doc.splitlines() if line.strip()]
    for dim in kind.dims:
        default = "???" if dim.default is None else dim.choices[dim.default] if dim.choices else dim.default
        lines.append(f"{dim.name}: {default}" + (f"  # {dim.help}" if dim.help else ""))
    return "\n".join([*lines, "dtype: bf16", "out_dtype: null  # as dtype"])


def _choices(group: str, usual: str | None) -> str:
    names = choices(group)
    default = f"  (default {usual})" if usual else ""
    if len(names) <= MOST:
        return f"  {group}={'|'.join(names)}{default}"
    where = f"`opcast list {LISTED[group]}`" if group in LISTED else f"conf/{group}"
    return f"  {group}=NAME, one of {len(names)}: {where} lists them{default}"


def body(path: Path) -> str:
    """The settings of a file in ``conf/`` as written: without its first comment, its defaults list and Hydra's part."""
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"\A(#.*\n)+", "", text)
    text = re.sub(r"^(defaults|hydra):\n(?:[ \t]+.*\n|\n)*", "", text, flags=re.MULTILINE)
    return re.sub(r"^sources:\n(?:[ \t]+.*\n?)*", "", text, flags=re.MULTILINE).strip("\n")


def text_of(settings: Sequence[RequestSetting], folded: Mapping[str, int] = EMPTY) -> str:
    """Settings as YAML, each with its default and what it is for; of ``folded`` groups one line with their number."""
    return "\n".join(line for entry in _nested(settings) for line in _lines(*entry, folded))


def _nested(settings: Sequence[RequestSetting]) -> list[tuple[str, Any, str, Sequence[RequestSetting]]]:
    """Name, default, help and inner settings of each; those of one group of the command line under its name."""
    values = defaults_of(settings)
    help_by_path = {setting.path: setting.help for setting in settings}
    inner = {setting.path: setting.inside for setting in settings}
    return [
        (name, value, help_by_path.get(name, ""), inner.get(name) or _inside(name, value, settings))
        for name, value in values.items()
    ]


def _inside(name: str, value: Any, settings: Sequence[RequestSetting]) -> Sequence[RequestSetting]:
    """The settings of a group that only the command line has, such as ``engine``."""
    within = [setting for setting in settings if setting.path.startswith(f"{name}.")]
    return [replace(setting, name=setting.path.partition(".")[2]) for setting in within]


def _lines(
    name: str, value: Any, help_text: str, inside: Sequence[RequestSetting], folded: Mapping[str, int] = EMPTY
) -> list[str]:
    """One line, or one for each setting within where these have help of their own."""
    if name in folded:
        return [f"{name}: {counted(folded[name], 'setting')}".ljust(COMMENTS) + f"  # {help_text}: --help={name}"]
    if isinstance(value, dict) and any(setting.help for setting in inside):
        lines = [f"{name}:" + (f"  # {help_text}" if help_text else "")]
        for setting in inside:
            lines += [f"  {line}" for line in _lines(setting.name, value[setting.name], setting.help, ())]
        return lines
    return [
        f"{name}: {value_text(value)}".ljust(COMMENTS) + f"  # {help_text}"
        if help_text
        else f"{name}: {value_text(value)}"
    ]


def value_text(value: Any) -> str:
    """A default as a person writes it on the command line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {value_text(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(value_text, value))}]"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return '""' if value == "" else str(value)


def indent_lines(text: str) -> str:
    """Two spaces before each line that is not empty."""
    return "\n".join(f"  {line}" if line.strip() else "" for line in text.splitlines())
