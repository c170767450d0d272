"""``opcast new device NAME like=h100_sxm``: the file of a device or cluster of one's own, to edit."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..datasets.clusters import CLUSTER_DIRECTORY, known_clusters, load_cluster
from ..datasets.devices import DEVICE_DIRECTORY, device_aliases, known_devices, load_device
from ..datasets.loading import meant
from .show import BadInputError, print_json, say, wants_json
from .writing import write_text

WORDS = ("device", "cluster")
NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
USE = {  # what is done with the file
    "device": "opcast predict op=gemm op.m=4096 op.n=4096 op.k=4096 device={path}",
    "cluster": "opcast simulate workload=train model=llama3_8b cluster={path}",
}


def words(arguments: Sequence[str]) -> list[str]:
    """``device NAME`` as the settings that they are."""
    texts = list(arguments)
    plain = [text for text in texts[:2] if "=" not in text and not text.startswith("-")]
    return [*(f"{name}={text}" for name, text in zip(("what", "name"), plain, strict=False)), *texts[len(plain) :]]


def run(config: dict[str, Any]) -> int:
    """Write the file and say what to do with it; returns the exit code."""
    as_json = wants_json(config)
    what, name, like = _asked(config)
    path = Path(str(config["to"] or f"{name}.yaml")).expanduser()
    if path.exists():
        raise BadInputError(f"to={path} exists: name another, or take that one away")
    write_text("to", path, own_figures(what, name, like))
    if as_json:
        print_json({"what": what, "id": name, "like": like, "file": str(path)})
    say(f"{what} {name}: edit {path}, then: {USE[what].format(path=path)}")
    return 0


def _asked(config: Mapping[str, Any]) -> tuple[str, str, str]:
    """What is wanted, its name, and the known one that it begins with. BadInputError for what cannot be."""
    what, name, like = (config[key] for key in ("what", "name", "like"))
    if what not in WORDS:
        raise BadInputError(
            "say what is new: `opcast new device NAME like=h100_sxm` or `opcast new cluster NAME like=dgx_h100`"
        )
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise BadInputError(f"`opcast new {what}` needs a name of letters, digits, - and _, not {name!r}")
    shipped = known_devices() if what == "device" else known_clusters()
    short = device_aliases() if what == "device" else frozenset[str]()
    if name in shipped or name.lower() in short:
        raise BadInputError(f"{what} {name} ships with opcast: take another name")
    if like is None:
        raise BadInputError(f"say which {what} it is like: like={shipped[0]}, or another of `opcast list {what}s`")
    first_id = (load_device if what == "device" else load_cluster)(str(like)).id
    if first_id not in shipped:
        raise BadInputError(f"like={like} has no file that ships{meant(str(like), shipped)}")
    return what, name, first_id


def own_figures(what: str, name: str, like: str) -> str:
    """The text of a known one's file under another id: its figures, without what says where these are from."""
    folder = DEVICE_DIRECTORY if what == "device" else CLUSTER_DIRECTORY
    lines = (folder / f"{like}.yaml").read_text(encoding="utf-8").splitlines()
    figures: list[str] = []
    inside_sources = False
    for line in lines:
        inside_sources = line.startswith("sources:") or (inside_sources and line.startswith((" ", "#")))
        if inside_sources or (not figures and line.startswith("#")):
            continue
        # in quotes, so that on and 007 stay texts
        figures.append(re.sub(r"^(id|name): .*", lambda match: f'{match[1]}: "{name}"', line))
    head = [
        f"# The figures of {like}, to be edited (docs/clusters.md); `sources` is where yours are from.",
        "",
    ]
    return "\n".join([*head, *figures, "sources: {}", ""])
