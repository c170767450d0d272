"""``opcast trace``: execution traces, one sub-command for each thing that is done with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..datasets.loading import nearest
from .show import BadInputError, print_json, say, wants_json

SUBJECT = "what"


def run(config: dict[str, Any]) -> int:
    """Do what was asked; returns the exit code."""
    wants_json(config)
    doing = DOING.get(str(config["what"]))
    if doing is None:
        raise BadInputError(f"`opcast trace` cannot {config['what']!r}; {nearest(config['what'], DOING, 'it can')}")
    return doing(config)


def given(config: Mapping[str, Any], name: str, why: str) -> Path:
    """A path that the sub-command needs."""
    if not config[name]:
        raise BadInputError(f"`opcast trace {config['what']}` needs {name}=…: {why}")
    return Path(str(config[name])).expanduser()


def check(config: dict[str, Any]) -> int:
    """Each problem of a trace or of a folder of traces as a line; exit code 2 when there are any."""
    from ..datasets.traces.checks import problems

    path = given(config, "path", "the trace, or a folder of NAME.RANK.et")
    found = problems(path)
    for line in found:
        say(f"opcast: {line}")
    if wants_json(config):
        print_json({"path": str(path), "problems": found})
    elif not found:
        say(f"{path}: nothing to complain about")
    return 2 if found else 0


def convert(config: dict[str, Any]) -> int:
    """A trace in another form."""
    from ..datasets.traces import json_forms, protobuf
    from ..datasets.traces.reading import read_trace

    path = given(config, "path", "the trace to convert")
    output = given(config, "output", "the file to write: .et, .et.gz or .json")
    trace = read_trace(path)
    if output.name.endswith((".et", ".et.gz")):
        protobuf.write(output, trace)
    elif output.name.endswith(".json"):
        json_forms.write_json(output, trace)
    else:
        raise BadInputError(f"output={output} must end in .et, .et.gz or .json")
    if wants_json(config):
        print_json({"path": str(path), "output": str(output), "nodes": len(trace)})
    else:
        say(f"{output}: {len(trace):,} nodes")
    return 0


DOING: dict[str, Callable[[dict[str, Any]], int]] = {"check": check, "convert": convert}
