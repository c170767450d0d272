"""setuptools' build backend, whose archives are the same bytes whenever they are built from the same files.

Wheels take their times from ``SOURCE_DATE_EPOCH``, which gets a value where it has none. Source archives of setuptools
keep times and owners of files: here they are written again without them.
"""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403

EPOCH = "SOURCE_DATE_EPOCH"
os.environ.setdefault(EPOCH, "1577836800")  # 2020-01-01: zip files know no time before 1980


def build_sdist(folder: str, settings: Any = None) -> str:
    """The name of the source archive that was built in a folder."""
    name = build_meta.build_sdist(folder, settings)
    timeless(Path(folder) / name, int(os.environ[EPOCH]))
    return name


def timeless(path: Path, moment: int) -> None:
    """Write a ``.tar.gz`` again: its members in the order of their names, all of one time and of nobody."""
    packed = io.BytesIO()
    with tarfile.open(path) as old, tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new:
        for member in sorted(old.getmembers(), key=lambda each: each.name):
            content = old.extractfile(member) if member.isfile() else None
            member.mtime, member.pax_headers = moment, {}
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            new.addfile(member, content)
    path.write_bytes(gzip.compress(packed.getvalue(), mtime=moment))
