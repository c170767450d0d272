"""Runs the notebooks of docs/examples and keeps what they print, so that the site shows real answers.

    python tests/benchmarks/notebooks.py [NAME …]

Each notebook runs from top to bottom in a home of its own, which is thrown away. Its cells share one namespace, as in
Jupyter. The value of a last expression is shown, too. With ``OPCAST_EXAMPLES=small`` sizes are small, as in tests.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "examples"


def answers(notebook: dict[str, Any]) -> list[str]:
    """What each cell of code prints, its last expression included, in order."""
    space: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return [printed("".join(cell["source"]), space) for cell in cells]


def printed(source: str, space: dict[str, Any]) -> str:
    """What a cell prints when it runs in a namespace; a last expression that is not None is shown below."""
    body = ast.parse(source).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(ast.Module(body, []), "<cell>", "exec"), space)
        value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), space) if last is not None else None
        if value is not None:
            print(value)
    return out.getvalue()


def kept(notebook: dict[str, Any], said: list[str]) -> dict[str, Any]:
    """The notebook with these answers below its cells of code."""
    texts = iter(said)
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            text = next(texts)
            stream = {"output_type": "stream", "name": "stdout", "text": text.splitlines(keepends=True)}
            cell["outputs"] = [stream] if text else []
    return notebook


def main() -> None:
    """Run the notebooks named, or all of them, and write their answers into their files."""
    for path in sorted(FOLDER.glob("*.ipynb")):
        if sys.argv[1:] and path.stem not in sys.argv[1:]:
            continue
        notebook = json.loads(path.read_text(encoding="utf-8"))
        with tempfile.TemporaryDirectory() as home:
            os.environ["OPCAST_HOME"] = home
            said = answers(notebook)
        path.write_text(json.dumps(kept(notebook, said), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"{path.stem}: {sum(map(bool, said))} answers")


if __name__ == "__main__":
    main()
