"""Files that `opcast trace` is given: paths, folders of profiles, runs of traces whatever form they are in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .show import BadInputError, print_json, say, wants_json

if TYPE_CHECKING:
    from ..datasets.traces.groups import RankedTraces


def given(config: Mapping[str, Any], name: str, why: str) -> Path:
    """A path that the sub-command needs."""
    if not config[name]:
        raise BadInputError(f"`opcast trace {config['what']}` needs {name}=…: {why}")
    return Path(str(config[name])).expanduser()


def tell(config: dict[str, Any], plain: Mapping[str, Any], line: str) -> int:
    """What was done, as the JSON object or in a line; returns the exit code."""
    print_json(plain) if wants_json(config) else say(line)
    return 0


def files_of(path: Path) -> list[Path]:
    """A file, or the JSON files of a folder in the order of the numbers in their names."""
    if not path.is_dir():
        return [path]
    files = [entry for entry in path.iterdir() if entry.name.endswith((".json", ".json.gz"))]
    if not files:
        raise BadInputError(f"{path} holds no .json files")
    return sorted(files, key=lambda file: [int(digits) for digits in re.findall(r"\d+", file.name)])


def sighted(run: RankedTraces, path: Path) -> None:
    """BadInputError where profiles hold no kernels: nothing can be compared with what the device did."""
    from ..datasets.traces.classes import is_blind, note_of

    for trace in run.traces.values():
        if is_blind(trace):
            raise BadInputError(f"{path}: {note_of(trace)}")


def run_at(path: Path) -> RankedTraces:
    """The traces of a file or folder, profiles linked on the way."""
    from ..datasets.traces.groups import RankedTraces
    from ..datasets.traces.json_forms import is_profile
    from ..datasets.traces.linking import link_files
    from ..simulator.execution.run import read_run

    first = files_of(path)[0] if path.is_dir() and not any(path.glob("*.et*")) else path
    if first.is_file() and first.name.endswith((".json", ".json.gz")) and is_profile(first):
        traces, _, groups = link_files(files_of(path))
        return RankedTraces(traces, groups if len(traces) > 1 else {})
    return read_run(path)
