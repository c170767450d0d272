"""The one command that brings what is missing, with the pip of this very environment."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def install_command(extra: str) -> str:
    """How to install an extra: in a checkout from it, else by name."""
    here = (ROOT / "pyproject.toml").is_file()
    what = ["--editable", f"{ROOT}[{extra}]"] if here else [f"opcast[{extra}]"]
    return shlex.join([sys.executable, "-m", "pip", "install", *what])
