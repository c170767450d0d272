"""Fits what the host adds to served runs: one command on a table of them, scored on groups that were left out.

    python tests/evidence/hosts.py TABLE.csv [--output conf/serving_host.json] [--scores FILE.json] [--rows N]

Runs are simulated without a host. An iteration's host time lengthens every token by itself, a first token's the TTFT by
itself; to first order nothing else changes. The figures of an engine (``HostTime``, none below 0) are those of least
error in ln under a loss that lets single runs go (soft L1), drawn towards those of all engines. What
an engine that works a step ahead adds to an iteration is hidden behind the GPU (:data:`HIDDEN`): fitted, it would only
take up errors of some models' steps, and worsen others. A group is a model on a system; a group of many rows counts as
the root of its number.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path

import numpy as np

from opcast.datasets.truth import Row, ServingRow, read_table
from opcast.simulator.question.sources import Sources
from opcast.simulator.serving.host import (
    FIGURES,
    SERIAL,
    FirstToken,
    FittedHost,
    FittedHosts,
    HostTime,
    layers_and_experts,
)
from opcast.simulator.validation.answers import Engines
from opcast.simulator.validation.cases import ValidationSettings
from opcast.simulator.validation.metrics import grouped
from opcast.simulator.validation.serving import Replicas, host_of, played
from opcast.simulator.workbench import workbench

QUANTITIES = ("tpot", "ttft", "throughput")
SCALE = {"tpot": 0.05, "ttft": 0.15}  # ln: errors beyond it count less
SPREAD = (2000.0, 50.0, 20e3, 500.0, 3.0, 300.0, 500.0)  # microseconds: how far engines are from each other
BEFORE = (2000.0, 50.0, 50e3, 1000.0, 10.0, 500.0, 1000.0)  # and all of them from none
HIDDEN = ("step_us", "seq_us")
EVERY = "all"
NINETY = 0.9  # of the errors are within a width
DRAWN = 10  # rows: widths of an engine are drawn towards those of all
LEAST_ROWS = 8
FOLDS = 4
Errors = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class ServedRun:
    """A run, and its prediction without a host: times in ms, ``running`` requests on a rank, mean ``prompt`` and
    ``output`` tokens."""

    id: str
    engine: str
    backend: str
    system: str
    model: str
    clients: int
    running: float
    prompt: float
    output: float
    predicted: Mapping[str, float]
    measured: Mapping[str, float]
    layers: int = 0
    experts: int = 0

    @property
    def group(self) -> str:
        """The model on its system: never on both sides of a split."""
        return f"{self.model} {self.system}"

    def under(self, host: HostTime) -> dict[str, float]:
        """TTFT and TPOT in ms, and output tokens a second, with a host."""
        tpot = self.predicted["tpot"] + (host.step_us + host.seq_us * self.running) * 1e-3
        waiting = self.predicted["ttft"] * (tpot / self.predicted["tpot"] if self.queued else 1.0)
        ttft = waiting + host.first_token_us(FirstToken(self.clients, self.prompt, self.layers, self.experts)) * 1e-3
        return {"tpot": tpot, "ttft": ttft, "throughput": self.rate(ttft, tpot)}

    @property
    def queued(self) -> bool:
        """Whether most of the TTFT is waiting for others to end, which is as much longer as their tokens are."""
        return self.predicted["ttft"] > 50 * self.predicted["tpot"]

    def rate(self, ttft: float, tpot: float) -> float:
        """Output tokens a second of the closed loop."""
        return self.clients * self.output / (ttft + (self.output - 1) * tpot) * 1e3


def run_of(row: ServingRow, engine: str, times: Mapping[str, float]) -> ServedRun:
    """A row with what is predicted of it without a host (``ttft``, ``tpot`` in ms)."""
    mean = (1 + row.shortest) / 2
    output, dp = row.output_len * mean, row.layout.dp
    share = (output - 1) * times["tpot"] / (times["ttft"] + (output - 1) * times["tpot"])
    return ServedRun(
        id=row.id,
        engine=engine,
        backend=row.framework,
        system=row.tags["system"],
        model=row.tags["model"],
        clients=row.concurrency,
        running=row.concurrency / dp * share,
        prompt=row.input_len * mean,
        output=output,
        predicted=times,
        measured=row.measured,
        layers=layers_and_experts(row.config)[0],
        experts=layers_and_experts(row.config)[1],
    )


def observed(
    rows: Sequence[Row], setting: ValidationSettings, progress: Callable[[int], None] = lambda done: None
) -> list[ServedRun]:
    """Every served run of a table that can be simulated, without a host; those of workers that prefill and workers that
    decode have other hosts, and are left out."""
    replicas = Replicas(setting, Engines(setting).of)
    found = []
    for row in rows:
        if isinstance(row, ServingRow) and row.decoding is None:
            try:
                report = played(row, replicas, FittedHosts({}))
                times = {"ttft": report.ttft_ms.mean, "tpot": report.tpot_ms.mean}
                found.append(run_of(row, host_of(row), times))
            except ValueError as error:
                if not type(error).__module__.startswith("opcast"):
                    raise
        progress(1)
    return found


# --- the fit -----------------------------------------------------------------------------------------------


def fitted(runs: Sequence[ServedRun]) -> FittedHosts:
    """The figures of all engines that runs are known of, and of ``all``, without widths."""
    every = fit(runs, np.zeros(len(FIGURES)), np.array(BEFORE), HIDDEN)
    usual = np.array([every.value[name] for name in FIGURES])
    parts = grouped(runs, lambda run: run.engine)
    known = {
        name: fit(own, usual, np.array(SPREAD), () if name.endswith(SERIAL) else HIDDEN)
        for name, own in sorted(parts.items())
        if len(own) >= LEAST_ROWS
    }
    return FittedHosts({EVERY: every, **known})


def fit(runs: Sequence[ServedRun], towards: np.ndarray, spread: np.ndarray, hidden: Sequence[str] = ()) -> FittedHost:
    """The figures of least error, with standard errors from the curvature there; those ``hidden`` are 0."""
    from scipy.optimize import least_squares

    counts = {name: len(own) for name, own in grouped(runs, lambda run: run.group).items()}
    weight = np.array([counts[run.group] ** -0.5 for run in runs])

    open_ = np.array([name not in hidden for name in FIGURES])

    def figures(unit: np.ndarray) -> np.ndarray:
        made = np.zeros(len(FIGURES))
        made[open_] = unit * spread[open_]
        return made

    def errors(unit: np.ndarray) -> np.ndarray:
        host = HostTime(*figures(unit))
        found = [run.under(host) for run in runs]
        off = [
            weight * np.log([each[name] / run.measured[name] for each, run in zip(found, runs, strict=True)]) / scale
            for name, scale in SCALE.items()
        ]
        return np.concatenate([*map(_soft, off), unit - (towards / spread)[open_]])

    start = np.maximum(towards / spread, 0.05)[open_]
    found = least_squares(errors, start, bounds=(0.0, np.inf))
    curvature = found.jac.T @ found.jac
    error, values = figures(np.sqrt(np.diag(np.linalg.inv(curvature)))), figures(found.x)
    return FittedHost(
        {name: round(float(value), 3) for name, value in zip(FIGURES, values, strict=True)},
        {name: round(float(value), 3) for name, value in zip(FIGURES, error, strict=True)},
        len(runs),
        len(counts),
        max(run.clients for run in runs),
    )


def _soft(error: np.ndarray) -> np.ndarray:
    """Errors whose squares grow no faster than themselves beyond 1."""
    return np.asarray(np.sign(error) * np.sqrt(2.0 * (np.sqrt(1.0 + error**2) - 1.0)))


# --- scores ------------------------------------------------------------------------------------------------


def errors_of(runs: Iterable[ServedRun], hosts: FittedHosts) -> dict[str, dict[str, float]]:
    """ln of measured over answered, by row and quantity."""
    return {run.id: {name: _off(run, name, hosts) for name in QUANTITIES} for run in runs}


def _off(run: ServedRun, name: str, hosts: FittedHosts) -> float:
    measured = run.rate(run.measured["ttft"], run.measured["tpot"]) if name == "throughput" else run.measured[name]
    return float(np.log(measured / run.under(hosts.of(run.engine))[name]))


def left_out(runs: Sequence[ServedRun], by: Callable[[ServedRun], str]) -> dict[str, dict[str, float]]:
    """Errors of each group under the figures that were fitted without it."""
    made: dict[str, dict[str, float]] = {}
    for name, own in sorted(grouped(runs, by).items()):
        others = [run for run in runs if by(run) != name]
        made |= errors_of(own, fitted(others) if others else FittedHosts({}))
    return made


def folds(runs: Iterable[ServedRun]) -> dict[str, int]:
    """Which of :data:`FOLDS` parts each group is in: as many groups in each, by a hash of their names."""
    names = sorted({run.group for run in runs}, key=lambda name: sha256(name.encode()).hexdigest())
    return {name: place % FOLDS for place, name in enumerate(names)}


def ways(runs: Sequence[ServedRun]) -> dict[str, Callable[[ServedRun], str]]:
    """What is left out: a part of the groups, a backend, a system."""
    part = folds(runs)
    return {
        "groups": lambda run: str(part[run.group]),
        "backend": lambda run: run.backend,
        "system": lambda run: run.system,
    }


def widths(runs: Sequence[ServedRun], groups: Errors, backend: Errors) -> dict[str, dict[str, float]]:
    """What 90 % of the errors (ln) are within, by engine and quantity: with a part of the groups left out, and for
    ``all`` with the backend left out."""
    made: dict[str, dict[str, float]] = {EVERY: {}}
    for name in QUANTITIES:
        made[EVERY][name] = _ninety([abs(backend[run.id][name]) for run in runs])
        usual = _ninety([abs(groups[run.id][name]) for run in runs])
        for engine, own in sorted(grouped(runs, lambda run: run.engine).items()):
            of = _ninety([abs(groups[run.id][name]) for run in own])
            mixed = (len(own) * np.log(of) + DRAWN * np.log(usual)) / (len(own) + DRAWN)
            made.setdefault(engine, {})[name] = round(float(np.exp(mixed)), 4)
    return made


def _ninety(errors: Sequence[float]) -> float:
    return round(float(np.quantile(errors, NINETY)), 4)


@dataclass(frozen=True)
class HostFit:
    """Fitted hosts with their widths, the runs, and errors by how each run was answered (ln of measured over it)."""

    hosts: FittedHosts
    runs: tuple[ServedRun, ...]
    errors: Mapping[str, Errors]

    def scores(self) -> dict[str, dict[str, dict[str, dict[str, float]]]]:
        """Median, p90 and bias in percent by group of rows, way of answering and quantity; of ``groups`` also how
        often 90 % intervals, from widths of the other parts, held the measurement."""
        stated = self._stated()
        parts: dict[str, list[ServedRun]] = {EVERY: list(self.runs)}
        for name in ("backend", "system", "model"):
            parts |= grouped(self.runs, lambda run: getattr(run, name))  # noqa: B023  used at once
        return {
            part: {
                how: {
                    name: _score([of[run.id][name] for run in own])
                    | (_held([(of[run.id][name], stated[run.id][name]) for run in own]) if how == "groups" else {})
                    for name in QUANTITIES
                }
                for how, of in self.errors.items()
            }
            for part, own in parts.items()
        }

    def _stated(self) -> dict[str, dict[str, float]]:
        """Half-widths of each run's intervals, from the errors of the other parts of the groups."""
        made, part = {}, folds(self.runs)
        for fold in range(FOLDS):
            others = [run for run in self.runs if part[run.group] != fold]
            own = [run for run in self.runs if part[run.group] == fold]
            known = widths(others or own, self.errors["groups"], self.errors["backend"])
            for run in own:
                made[run.id] = known.get(run.engine) or known[EVERY]
        return made


def host_fit(runs: Sequence[ServedRun]) -> HostFit:
    """The fit, and what it says of runs that it was not made from."""
    hosts = fitted(runs)
    errors: dict[str, Errors] = {"none": errors_of(runs, FittedHosts({})), "fitted": errors_of(runs, hosts)}
    errors |= {how: left_out(runs, by) for how, by in ways(runs).items()}
    groups = len({run.group for run in runs})
    made_by = f"tests/evidence/hosts.py on {len(runs)} served runs of {groups} models on systems"
    found = replace(hosts, widths=widths(runs, errors["groups"], errors["backend"]), made_by=made_by)
    return HostFit(found, tuple(runs), errors)


def as_values(hosts: FittedHosts) -> dict[str, object]:
    """Fitted hosts as their file has them."""
    return {
        "made_by": hosts.made_by,
        "source": {name: text for name, text in asdict(hosts.source).items() if text},
        "engines": {name: asdict(each) for name, each in hosts.engines.items()},
        "widths": {name: dict(each) for name, each in hosts.widths.items()},
    }


def _score(errors: Sequence[float]) -> dict[str, float]:
    off = np.abs(np.expm1(-np.asarray(errors))) * 100
    return {
        "rows": len(errors),
        "median": round(float(np.median(off)), 1),
        "p90": round(float(np.quantile(off, NINETY)), 1),
        "bias": round(float(np.expm1(-np.median(errors)) * 100), 1),
    }


def _held(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    errors, half = (np.array(each) for each in zip(*pairs, strict=True))
    return {
        "coverage": round(float((np.abs(errors) <= half).mean()), 3),
        "width": round(float(2 * half.mean()), 3),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=Path, nargs="+")
    parser.add_argument("--rows", type=int, default=3000, help="the first so many")
    parser.add_argument("--output", type=Path, help="where figures of hosts are written")
    parser.add_argument("--scores", type=Path, help="where scores are written")
    chosen = parser.parse_args(arguments)
    rows = [row for table in chosen.tables for row in read_table(table, setting="tables").rows]
    made = host_fit(observed(rows[: chosen.rows], workbench(Sources()).validation()))
    scores = made.scores()
    for path, values in ((chosen.output, as_values(made.hosts)), (chosen.scores, scores)):
        if path:
            path.write_text(json.dumps(values, indent=1) + "\n")
    for name, of in scores.items():
        for quantity in QUANTITIES:
            said = (f"{how} {each[quantity]['median']:.1f} / {each[quantity]['p90']:.1f}" for how, each in of.items())
            print(f"{name}: {quantity}, {of['none'][quantity]['rows']} rows: {', '.join(said)}")


if __name__ == "__main__":
    main()
