"""What docstrings refer to is there: every module, function, class and attribute named in a role such as ``:mod:``."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("datasets", "harness", "models", "simulator", "jobs")
MODULES = [ROOT / "__init__.py", *sorted(path for part in PARTS for path in (ROOT / part).rglob("*.py"))]
ROLE = re.compile(r":(mod|func|class|attr|meth|data|exc|obj):`~?([^`]+?)(?:\(\))?`")


@cache
def module_file(parts: tuple[str, ...]) -> Path | None:
    """The file of a dotted name below the root; None when it is no module."""
    folder = ROOT.joinpath(*parts)
    found = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    return found if found.is_file() or folder.is_dir() else None


@cache
def tree_of(path: Path) -> ast.Module:
    """The syntax tree of a module; empty for a folder without ``__init__.py``."""
    return ast.parse(path.read_text() if path.is_file() else "")


@cache
def names_of(path: Path) -> dict[str, ast.stmt]:
    """What a module defines, by name."""
    return names_in(tree_of(path).body)


def names_in(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """What statements define, by name: functions, classes, variables, imports, those under a condition too."""
    found: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).split(".")[0]: node for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                found |= {each.id: node for each in ast.walk(target) if isinstance(each, ast.Name)}
        for block in ("body", "orelse", "finalbody"):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found |= names_in(getattr(node, block, []))
    return found


@cache
def members(owner: ast.ClassDef) -> set[str]:
    """Fields, methods and attributes that a class gives itself."""
    own = {
        node.attr
        for node in ast.walk(owner)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }
    return own | set(names_in(owner.body))


def has(path: Path, names: list[str]) -> bool:
    """Whether a module holds a name, or a class in it the second name; what it imports is looked up at its source."""
    if not names:
        return True
    found = names_of(path).get(names[0])
    if isinstance(found, ast.ImportFrom) and found.level:
        package = path.relative_to(ROOT).parts[: -found.level]
        original = next(alias.name for alias in found.names if names[0] in (alias.asname, alias.name))
        return exists((*package, *(found.module or "").split("."), original, *names[1:]))
    if isinstance(found, ast.ClassDef) and len(names) == 2:
        return names[1] in members(found) or any(has(path, [ast.unparse(base), names[1]]) for base in found.bases)
    return found is not None and len(names) == 1


def exists(parts: tuple[str, ...]) -> bool:
    """Whether a dotted path from the root is a module, or a name in one."""
    parts = tuple(part for part in parts if part)
    for length in range(len(parts), -1, -1):
        path = module_file(parts[:length])
        if path is not None and (length or parts):
            return has(path, list(parts[length:]))
    return False


def leads_somewhere(role: str, target: str, path: Path, around: list[ast.ClassDef]) -> bool:
    """Whether what a role names exists, seen from the module and the classes it stands in."""
    dots = len(target) - len(target.lstrip("."))
    if dots:
        parts = (*path.relative_to(ROOT).parts[:-dots], *target.lstrip(".").split("."))
    elif target.startswith("opcast."):
        parts = tuple(target.split(".")[1:])
    else:
        names = target.split(".")
        return role != "mod" and (has(path, names) or any(names[0] in members(owner) for owner in around))
    return module_file(parts) is not None if role == "mod" else exists(parts)


def docstrings(node: ast.AST, around: list[ast.ClassDef]) -> Iterator[tuple[str, list[ast.ClassDef]]]:
    """Every docstring below a node, with the classes around it."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        around = [*around, node] if isinstance(node, ast.ClassDef) else around
        yield ast.get_docstring(node) or "", around
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr):  # which hold none
            yield from docstrings(child, around)


def lost(path: Path) -> list[str]:
    """References of a module's docstrings that lead nowhere."""
    return [
        f":{role}:`{target}`"
        for text, around in docstrings(tree_of(path), [])
        for role, target in ROLE.findall(text)
        if not leads_somewhere(role, target, path, around)
    ]


def test_references_in_docstrings_lead_somewhere() -> None:
    assert not {path.relative_to(ROOT).as_posix(): found for path in MODULES if (found := lost(path))}


@pytest.mark.parametrize(
    ("role", "target", "there"),
    [
        ("mod", ".axes", True),
        ("mod", ".axis", False),
        ("mod", "..datasets.ops", True),
        ("func", "build_plan", True),
        ("func", ".axes.joint_draws", True),
        ("func", ".axes.draw", False),
        ("meth", "CampaignPlan.from_json", True),
        ("meth", "CampaignPlan.from_yaml", False),
        ("attr", "Settings.seed", True),
        ("class", "opcast.harness.plan.Case", True),
        ("class", "opcast.harness.plan.Cases", False),
    ],
)
def test_a_lost_reference_would_be_seen(role: str, target: str, there: bool) -> None:
    assert leads_somewhere(role, target, ROOT / "harness" / "plan.py", []) is there
