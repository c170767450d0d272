"""``opcast data``: what a store holds (``summary``), what is wrong with it (``check``), how well two agree
(``repeat``); what has moved (``drift``) is :mod:`.drift`'s affair, what became better (``gain``) :mod:`.gain`'s."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..datasets import quality
from ..datasets.counts import counted
from ..datasets.near import meant
from ..datasets.repeatability import agreements
from ..datasets.store import Store
from .requests import VIEWS, DataRequest
from .show import BadInputError, print_json, say, table, wants_json

SUBJECT = "what"


def run(config: dict[str, Any]) -> int:
    """Print the summary or the findings; returns the exit code."""
    as_json = wants_json(config)
    if config["what"] not in VIEWS:
        views = ", ".join(f"`{name}`" for name in VIEWS[1:-1])
        near = meant(config["what"], VIEWS[1:])
        raise BadInputError(f"`opcast data` takes nothing, {views} or `{VIEWS[-1]}`, not {config['what']!r}{near}")
    request = DataRequest(config["what"], config["store"], str(config["against"] or ""))
    path = Path(request.store).expanduser()
    if not path.is_dir():
        raise BadInputError(f"store {path} does not exist; `opcast profile` makes one, store=… names another")
    store = Store(path)
    if request.what == "bundle":
        return bundle(store, config, as_json)
    if request.what == "gain":
        from . import gain

        return gain.run(store, config, as_json)
    if request.what == "nodes":
        from . import nodes

        return nodes.run(store, config, as_json)
    if request.what == "drift":
        from . import drift

        return drift.run(store, config, as_json)
    if request.what == "repeat":
        return repeat(store, request.against, as_json)
    return check(store, as_json) if request.what == "check" else summarise(store, as_json)


def bundle(store: Store, config: dict[str, Any], as_json: bool) -> int:
    """Write what was measured here as one file to share."""
    from ..datasets.bundle import pack

    for name in ("output", "site", "license"):
        if not config[name]:
            raise BadInputError(
                f"`opcast data bundle` needs {name}=…, as output=h100.tar.gz site=mylab license=Apache-2.0"
            )
    path = Path(str(config["output"])).expanduser()
    if not isinstance(config["attach"], list):
        raise BadInputError(f"attach={config['attach']} must be a list of files, as attach=[machine.txt,report.html]")
    attached = [Path(str(attachment)).expanduser() for attachment in config["attach"]]
    pack_report = pack(store, path, str(config["site"]), str(config["license"]), str(config["run"] or ""), attached)
    rows = sum(file.get("rows", 0) for file in pack_report.files.values())
    if as_json:
        print_json({"bundle": str(path), "rows": rows, **asdict(pack_report)})
    else:
        say(f"{counted(rows, 'row')} of site {pack_report.site} in {path}, license {pack_report.license}")
    return 0


def summarise(store: Store, as_json: bool) -> int:
    """What the store holds; exit code 1 when a file of it cannot be read."""
    rows, damaged = ([asdict(row) for row in row_group] for row_group in quality.survey(store))
    for problem in damaged:
        say(f"opcast: {problem['where']} {problem['what']}: {problem['do']}")
    if as_json:
        print_json({"store": str(store.path), "rows": rows, "damaged": damaged})
        return 1 if damaged else 0
    heads = list(rows[0]) if rows else ["store"]
    table(f"{store.path}", heads, [list(row.values()) for row in rows] or [["empty"]])
    return 1 if damaged else 0


def check(store: Store, as_json: bool) -> int:
    """What is wrong with the store; exit code 1 when anything is an error."""
    findings = [asdict(finding) for finding in quality.check(store)]
    if as_json:
        print_json({"store": str(store.path), "findings": findings})
    elif not findings:
        say(f"{store.path}: nothing to complain about")
    else:
        table(str(store.path), ("severity", "where", "what", "do"), [list(f.values()) for f in findings])
    return 1 if any(finding["severity"] == "error" for finding in findings) else 0


def repeat(store: Store, against: str, as_json: bool) -> int:
    """How far the same cases of another store differ from this one's: the noise floor of a device."""
    other = Path(against).expanduser()
    if not against or not other.is_dir():
        raise BadInputError(f"against={against or 'null'} must name the store of a second campaign on the same device")
    agreed = [asdict(agreement) for agreement in agreements(store, Store(other))]
    if not agreed:
        raise BadInputError(f"stores {store.path} and {other} share no kind and device with good rows")
    if as_json:
        print_json({"store": str(store.path), "against": str(other), "kinds": agreed})
        return 0
    rows = [[f"{value:.1f}" if isinstance(value, float) else value for value in row.values()] for row in agreed]
    heads = ("op", "device", "rows", "median %", "p90 %", "most %", "bias %", "in one only")
    table(f"{other} against {store.path}", heads, rows)
    return 0
