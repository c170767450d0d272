"""The golden questions of ``cases.yaml``, asked through the command line in this process, in a home of their own.

Nothing here knows a module below ``jobs/cli.py`` but the store, which is written as ``opcast profile`` writes it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
ANSWERS = FOLDER / "answers"
UNTOLD = ("wall_time_s",)  # what no two runs agree on
WHEN = datetime(2026, 1, 1, tzinfo=UTC)
# Lists whose order is that of a figure, largest first: two that are alike but for the last digit may change places on
# another machine. They are kept in the order of what they name.
RANKED = ("by_op", "communications", "critical", "hot_links", "measure_next")


class AskedError(Exception):
    """A question that ended with another exit code than 0."""


@dataclass(frozen=True)
class Questions:
    """What ``cases.yaml`` holds: words of each case, files to write, devices and rows of the store."""

    cases: Mapping[str, list[str]]
    files: Mapping[str, str]
    devices: list[dict[str, Any]]
    measurements: list[dict[str, Any]]


def questions() -> Questions:
    """The cases, in the order of the file."""
    import yaml

    read = yaml.safe_load((FOLDER / "cases.yaml").read_text("utf-8"))
    cases = {name: shlex.split(words) for name, words in read["cases"].items()}
    return Questions(cases, read["files"], read["devices"], read["measurements"])


def write_home(home: Path, asked: Questions) -> None:
    """The files of the questions and the store they need, in an empty folder."""
    from opcast.datasets.devices import Device
    from opcast.datasets.ops import make_op
    from opcast.datasets.schema import Measurement
    from opcast.datasets.store import Store

    files = home / "files"
    files.mkdir(parents=True)
    for name, text in asked.files.items():
        path = files / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, "utf-8")
    store = Store(home / "store")
    for figures in asked.devices:
        store.save_device(Device.from_dict(figures))
    rows = []
    for row in asked.measurements:
        op = make_op(**row["op"])
        rows.append(Measurement(op=op, run_id="golden", measured_at=WHEN, **{k: row[k] for k in row if k != "op"}))
    store.write(rows, "golden")


def ask(words: list[str], home: Path) -> dict[str, Any]:
    """The answer of one question, in the form that is kept; AskedError with what stderr said if there is none."""
    from opcast.jobs.cli import main
    from opcast.simulator.trace.capture import one_thread

    given = [word.replace("{files}", str(home / "files")) for word in words]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), one_thread():
        code = main([*given, f"home={home}", "format=json"])
    if code != 0:
        raise AskedError(f"exit code {code}: {err.getvalue().strip()}")
    answer: dict[str, Any] = kept(json.loads(out.getvalue()), str(home))
    return answer


def kept(value: Any, home: str, name: str = "") -> Any:
    """An answer without wall times, folders and the order of near-equal figures."""
    if isinstance(value, dict):
        return {key: kept(item, home, key) for key, item in value.items() if key not in UNTOLD}
    if isinstance(value, list):
        items = [kept(item, home) for item in value]
        return sorted(items, key=naming) if name in RANKED else items
    return value.replace(home, "HOME") if isinstance(value, str) else value


def naming(value: Any) -> str:
    """What an item is about: all of it that is no fraction."""
    if isinstance(value, dict):
        return json.dumps({key: naming(item) for key, item in value.items()}, sort_keys=True)
    return "" if isinstance(value, float) else json.dumps(value, sort_keys=True)


def text_of(answer: Mapping[str, Any]) -> str:
    """An answer as its file has it: keys in order, floats with all their digits."""
    return json.dumps(answer, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def stored(name: str) -> dict[str, Any] | None:
    """The reviewed answer of a case, None where there is none yet."""
    path = ANSWERS / f"{name}.json"
    return json.loads(path.read_text("utf-8")) if path.is_file() else None


def write(name: str, answer: Mapping[str, Any]) -> None:
    """Put a case's answer in its file, in one piece."""
    ANSWERS.mkdir(exist_ok=True)
    part = ANSWERS / f".{name}.part"
    part.write_text(text_of(answer), "utf-8")
    os.replace(part, ANSWERS / f"{name}.json")
