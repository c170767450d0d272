"""Every constant of the latency law, and what measured operators say of it.

    python tests/benchmarks/constants.py STORE... [--write]

For each number of ``models/analytical``: how far ln(measured / law) spreads in the tables of the stores that depend on
it (a table one voice, in percent), with the constant as it is and with 0.5 to 2 times of it. A factor of a whole table
is left out: it is what predictors and calibration take off first. ``--write`` puts the table into
``docs/constants.md``, which a test holds to name every constant with its value.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import pkgutil
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from unittest import mock

import numpy as np

from opcast.datasets.backends import framework
from opcast.datasets.devices import DeviceError, load_device
from opcast.datasets.store import Store
from opcast.models import analytical
from opcast.models.table import MeasurementTable, tables

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "constants.md"
TABLE = re.compile(r"(<!-- constants -->\n).*?(<!-- end of constants -->)", re.DOTALL)
FACTORS = (0.5, 0.7, 1.0, 1.4, 2.0)
ROWS, LEAST = 300, 30  # of a table
CHANGES = 1e-3  # of a table's error: less is no dependence
HEAD = f"| constant | value | tables | {' | '.join(f'× {each:g}' for each in FACTORS)} |\n" + "| --- " * 8 + "|\n"


@dataclass(frozen=True)
class Constant:
    """A number of a module of the law."""

    module: str
    name: str
    value: float


def modules() -> list[ModuleType]:
    """The modules of the law."""
    names = sorted(each.name for each in pkgutil.iter_modules(analytical.__path__))
    return [importlib.import_module(f"{analytical.__name__}.{name}") for name in names]


def constants() -> list[Constant]:
    """Every number with a fraction or point that a module of the law gives a name of its own."""
    found = []
    for module in modules():
        for node in ast.parse(Path(str(module.__file__)).read_text("utf-8")).body:
            if isinstance(node, ast.Assign):
                for target in ast.walk(node.targets[0]):
                    value = getattr(module, target.id) if isinstance(target, ast.Name) else None
                    if isinstance(value, float):
                        found.append(Constant(module.__name__.rpartition(".")[2], str(target.id), value))  # type: ignore[attr-defined]
    return found


@contextmanager
def changed(constant: Constant, factor: float) -> Iterator[None]:
    """The law with a constant so many times as large, in whatever module has it."""
    with ExitStack() as stack:
        for module in modules():
            own = module.__name__.rpartition(".")[2] == constant.module
            taken = getattr(module, constant.name, None) == constant.value
            if own or (taken and constant.name not in _own_names(module)):
                stack.enter_context(mock.patch.object(module, constant.name, constant.value * factor))
        yield


def _own_names(module: ModuleType) -> set[str]:
    """What a module assigns itself, and has from no other."""
    body = ast.parse(Path(str(module.__file__)).read_text("utf-8")).body
    return {
        each.id
        for node in body
        if isinstance(node, ast.Assign)
        for each in ast.walk(node)
        if isinstance(each, ast.Name)
    }


def samples(stores: Sequence[Store]) -> Iterator[MeasurementTable]:
    """Some rows of the largest table of each kind, device and framework."""
    for store in stores:
        for kind in store.kinds():
            for device_id in store.devices(kind):
                try:
                    made = tables(kind, store.read(kind, device_id), load_device(device_id))
                except DeviceError:
                    continue
                for name in sorted({framework(each.backend) for each in made}):
                    own = max((each for each in made if framework(each.backend) == name), key=len)
                    if len(own) >= LEAST:
                        rows = np.random.default_rng(0).permutation(len(own))[:ROWS]
                        yield own.take(np.sort(rows))


def missed(table: MeasurementTable) -> float:
    """Spread of ln(measured / law) of a table: the median distance from its median."""
    found = np.empty(len(table))
    for rows, ops in table.groups():
        law = analytical.latency_us(ops, table.device)
        found[rows] = np.log(table.latency_us[rows] / law)
    return float(np.median(np.abs(found - np.median(found))))


def line(constant: Constant, known: Sequence[MeasurementTable], usual: np.ndarray) -> str:
    """The row of a constant."""
    found = {1.0: usual}
    for factor in FACTORS:
        if factor != 1.0:
            with changed(constant, factor):
                found[factor] = np.array([missed(each) for each in known])
    depends = np.max([np.abs(each - usual) for each in found.values()], axis=0) > CHANGES
    name = f"| `{constant.module}.{constant.name}` | {constant.value:g} | {depends.sum()} |"
    if not depends.any():
        return f"{name} {'| ' * len(FACTORS)}".rstrip()
    means = {factor: 100.0 * float(np.expm1(found[factor][depends]).mean()) for factor in FACTORS}
    least = min(means.values())
    return name + "".join(f" {'**' * (mean == least)}{mean:.1f}{'**' * (mean == least)} |" for mean in means.values())


def main() -> None:
    """Print the table, and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stores", type=Path, nargs="+")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    known = list(samples([Store(path) for path in asked.stores]))
    usual = np.array([missed(each) for each in known])
    print(HEAD, end="")
    lines = []
    for constant in constants():
        lines.append(line(constant, known, usual))
        print(lines[-1], flush=True)
    if asked.write:
        text = TABLE.sub(lambda found: found[1] + HEAD + "\n".join(lines) + "\n" + found[2], PAGE.read_text("utf-8"))
        PAGE.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
