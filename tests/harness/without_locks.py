"""``recorded.py`` on a file system that has no locks, as NFS without its lock daemon."""

from __future__ import annotations

import errno
import fcntl
import os
import runpy
from pathlib import Path


def no_locks(*_: object) -> None:
    """What ``flock`` does there."""
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


if __name__ == "__main__":
    fcntl.flock = no_locks
    runpy.run_path(str(Path(__file__).with_name("recorded.py")), run_name="__main__")
