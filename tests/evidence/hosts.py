"""Fits what the host adds to served runs: one command on a table of them, scored on groups that were left out.

    python tests/evidence/hosts.py TABLE.csv [--runs FILE] [--output conf/serving_host.json] [--scores FILE.json]

Runs are simulated without a host. An iteration's host time lengthens every token by itself, a first token's the TTFT by
itself; to first order nothing else changes. The figures of an engine (``HostTime``, none below 0) are those of least
error in ln under a loss that lets single runs go (soft L1), drawn towards those of all engines. What an engine adds to
an iteration is not fitted (:data:`HIDDEN`): it would only take up errors of some models' steps, and worsen others. One
that works a step ahead adds nothing, of others the engine's rule says it. A group is a model on a system; a group of
many rows counts as the root of its number.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from opcast.datasets.figure_sources import FigureSource
from opcast.datasets.truth import Row, ServingRow, read_table
from opcast.datasets.truth.halves import half_of
from opcast.simulator.question.sources import Sources
from opcast.simulator.serving.engines import SerialHost, load_serving_engine
from opcast.simulator.serving.host import (
    FIGURES,
    KNOWN_OF,
    SERIAL,
    FirstToken,
    FittedHost,
    FittedHosts,
    HostTime,
    layers_and_experts,
    serial_host,
)
from opcast.simulator.validation.answers import Engines
from opcast.simulator.validation.cases import ValidationSettings
from opcast.simulator.validation.intervals import interval_score
from opcast.simulator.validation.metrics import grouped
from opcast.simulator.validation.serving import Replicas, host_of, played
from opcast.simulator.workbench import workbench

QUANTITIES = ("tpot", "ttft", "throughput")
SCALE = {"tpot": 0.05, "ttft": 0.15}  # ln: errors beyond it count less
SPREAD = (2000.0, 50.0, 20e3, 500.0, 3.0, 300.0, 500.0)  # microseconds: how far engines are from each other
BEFORE = (2000.0, 50.0, 50e3, 1000.0, 10.0, 500.0, 1000.0)  # and all of them from none
HIDDEN = ("step_us", "seq_us")
EVERY = "all"
WITH_REFUSED = "with rows refused by their result"
NINETY = 0.9  # of the errors are within a width
LEAST_GROUPS = 4  # that tell a width; of fewer all that was left out does
LEAST_ROWS = 8
FOLDS = 4
# Their client's clock runs while the next request waits for those before it: a first token comes later by the time of an
# answer over the clients, whatever its length. Their results tell this, so no host learns from them; they are scored
OWN_QUEUE = ("llama3_1_8b h100_sxm",)
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
    version: str = ""
    source: str = ""
    serial: SerialHost = SerialHost()

    @property
    def named(self) -> dict[str, str]:
        """What it ran, as :data:`KNOWN_OF` has it."""
        return {"engine": self.engine, "version": self.version, "system": self.system, "model": self.model}

    @property
    def half(self) -> str:
        """The half of the frozen split that its model on its system is in."""
        return half_of(self.source)

    @property
    def group(self) -> str:
        """The model on its system: never on both sides of a split."""
        return f"{self.model} {self.system}"

    def under(self, host: HostTime) -> dict[str, float]:
        """TTFT and TPOT in ms, and output tokens a second, with a host."""
        step_us, seq_us = host.step_us + self.serial.step_us, host.seq_us + self.serial.seq_us
        tpot = self.predicted["tpot"] + (step_us + seq_us * self.running) * 1e-3
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
        system=row.hardware.device,
        model=row.model,
        clients=row.concurrency,
        running=row.concurrency / dp * share,
        prompt=row.input_len * mean,
        output=output,
        predicted=times,
        measured=row.measured,
        layers=layers_and_experts(row.config)[0],
        experts=layers_and_experts(row.config)[1],
        version=f"{row.framework} {row.version}",
        source=row.source,
        serial=serial_of(row, engine),
    )


def serial_of(row: ServingRow, engine: str) -> SerialHost:
    """What the engine's rule says of its iterations, where it schedules no step ahead."""
    serial = serial_host(load_serving_engine(row.framework).host, row.version) if engine.endswith(SERIAL) else None
    return serial or SerialHost()


def observed(
    rows: Sequence[Row], setting: ValidationSettings, progress: Callable[[int], None] = lambda done: None
) -> dict[str, dict[str, float]]:
    """TTFT and TPOT in ms without a host, by id, of every served run that can be simulated; those of workers that
    prefill and workers that decode have other hosts, and are left out."""
    replicas = Replicas(setting, Engines(setting).of)
    found = {}
    for row in rows:
        if isinstance(row, ServingRow) and row.decoding is None:
            try:
                report = played(row, replicas, FittedHosts({}))
                found[row.id] = {"ttft": report.ttft_ms.mean, "tpot": report.tpot_ms.mean}
            except ValueError as error:
                if not type(error).__module__.startswith("opcast"):
                    raise
        progress(1)
    return found


def runs_of(rows: Iterable[Row], predicted: Mapping[str, Mapping[str, float]]) -> list[ServedRun]:
    """The served runs that have a prediction."""
    return [
        run_of(row, host_of(row), predicted[row.id])
        for row in rows
        if isinstance(row, ServingRow) and row.id in predicted
    ]


def read_runs(path: Path) -> dict[str, dict[str, float]]:
    """What ``--runs`` kept: TTFT and TPOT in ms without a host, by id."""
    return {row["id"]: {name: row[name] for name in SCALE} for row in pq.read_table(path).to_pylist()}


def write_runs(path: Path, predicted: Mapping[str, Mapping[str, float]]) -> None:
    """The same, into a Parquet file: no measured time is in it."""
    rows = [{"id": key, **times} for key, times in sorted(predicted.items())]
    pq.write_table(pa.Table.from_pylist(rows), path, compression="zstd")


# --- the fit -----------------------------------------------------------------------------------------------


def fitted(runs: Sequence[ServedRun]) -> FittedHosts:
    """The figures of all engines that runs are known of, and of ``all``, without widths; of :data:`OWN_QUEUE` alone where
    there are no others."""
    runs = [run for run in runs if run.group not in OWN_QUEUE] or runs
    every = fit(runs, np.zeros(len(FIGURES)), np.array(BEFORE))
    usual = np.array([every.value[name] for name in FIGURES])
    parts = grouped(runs, lambda run: run.engine)
    known = {name: fit(own, usual, np.array(SPREAD)) for name, own in sorted(parts.items()) if len(own) >= LEAST_ROWS}
    return FittedHosts({EVERY: every, **known})


def fit(runs: Sequence[ServedRun], towards: np.ndarray, spread: np.ndarray) -> FittedHost:
    """The figures of least error, with standard errors from the curvature there; those of :data:`HIDDEN` are 0."""
    from scipy.optimize import least_squares

    counts = {name: len(own) for name, own in grouped(runs, lambda run: run.group).items()}
    weight = np.array([counts[run.group] ** -0.5 for run in runs])

    open_ = np.array([name not in HIDDEN for name in FIGURES])

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
    """What is left out: a part of the groups, a backend, a version of it, a system, a model."""
    part = folds(runs)
    return {
        "groups": lambda run: str(part[run.group]),
        "backend": lambda run: run.backend,
        "version": lambda run: run.version,
        "system": lambda run: run.system,
        "model": lambda run: run.model,
    }


def widths(runs: Sequence[ServedRun], errors: Mapping[str, Errors]) -> dict[str, dict[str, float]]:
    """What the errors (ln) are within, by how many of engine, version, system and model no other run had and quantity.

    ``errors`` are by what was left out. What is known of less is no narrower.
    """
    by_count: dict[int, list[tuple[ServedRun, Mapping[str, float]]]] = {}
    for how, by in ways(runs).items():
        for left in grouped(runs, by).values():
            ids = {run.id for run in left}
            known = known_of([run for run in runs if run.id not in ids])
            for run in left:
                count = len(FittedHosts({}, known=known).unknown(run.named))
                by_count.setdefault(count, []).append((run, errors[how][run.id]))
    made: dict[str, dict[str, float]] = {}
    every = [pair for pairs in by_count.values() for pair in pairs]
    for count in range(len(KNOWN_OF) + 1):
        pairs = by_count.get(count, [])
        enough = pairs if len({run.group for run, _ in pairs}) >= LEAST_GROUPS else every
        before = made.get(str(count - 1), {})
        made[str(count)] = {name: max(_within(enough, name), before.get(name, 0.0)) for name in QUANTITIES}
    return made


def known_of(runs: Iterable[ServedRun]) -> dict[str, list[str]]:
    """The engines, versions, systems and models of some runs."""
    every = [run.named for run in runs]
    return {name: sorted({named[name] for named in every}) for name in KNOWN_OF}


def _within(pairs: Sequence[tuple[ServedRun, Mapping[str, float]]], quantity: str) -> float:
    """What nine of ten errors are within; a group of many rows counts as the root of its number."""
    counts = {name: len(of) for name, of in grouped((run for run, _ in pairs), lambda run: run.group).items()}
    weight = np.array([counts[run.group] ** -0.5 for run, _ in pairs])
    missed = np.array([abs(errors[quantity]) for _, errors in pairs])
    order = np.argsort(missed)
    place = np.searchsorted(np.cumsum(weight[order]) / weight.sum(), NINETY)
    return round(float(missed[order][min(int(place), len(missed) - 1)]), 4)


@dataclass(frozen=True)
class HostFit:
    """Fitted hosts with their widths, the runs, and errors by how each run was answered (ln of measured over it)."""

    hosts: FittedHosts
    runs: tuple[ServedRun, ...]
    errors: Mapping[str, Errors]

    def scores(self) -> dict[str, dict[str, dict[str, dict[str, float]]]]:
        """Median, mean, p90 and bias in percent by group of rows, way of answering and quantity; of what was left out
        also how often 90 % intervals, from the errors of other models alone, held the measurement, and their score.

        ``looked_at`` and ``unseen`` are halves of the models on systems (:mod:`opcast.datasets.truth.halves`).
        """
        stated = {how: self._stated(how) for how in ways(self.runs)}
        parts: dict[str, list[ServedRun]] = {EVERY: list(self.runs)}
        for name in ("half", "backend", "system", "model"):
            parts |= grouped(self.runs, lambda run: getattr(run, name))  # noqa: B023  used at once
        return {
            part: {
                how: {
                    name: _score([of[run.id][name] for run in own]) | self._held(own, stated.get(how, {}), how, name)
                    for name in QUANTITIES
                }
                for how, of in self.errors.items()
            }
            for part, own in parts.items()
        }

    def _held(
        self, own: Sequence[ServedRun], stated: Mapping[str, Mapping[str, float]], how: str, name: str
    ) -> dict[str, float]:
        known = [run.id for run in own if run.id in stated]
        errors = self.errors[how]
        return (
            interval_score([errors[key][name] for key in known], [stated[key][name] for key in known]) if known else {}
        )

    def _stated(self, how: str) -> dict[str, Mapping[str, float]]:
        """Half-widths of each run's intervals with so much left out, from the errors of other models."""
        made: dict[str, Mapping[str, float]] = {}
        by = ways(self.runs)[how]
        for model, own in grouped(self.runs, lambda run: run.model).items():
            others = [run for run in self.runs if run.model != model]
            if not others:
                continue
            known_widths = widths(others, {way: self.errors[way] for way in ways(self.runs)})
            for left, members in grouped(own, by).items():
                known = known_of(run for run in self.runs if by(run) != left)
                hosts = FittedHosts({}, known_widths, known=known)
                for run in members:
                    made[run.id] = {name: hosts.width(run.named, name) or 0.0 for name in QUANTITIES}
        return made


def host_fit(runs: Sequence[ServedRun]) -> HostFit:
    """The fit, and what it says of runs that it was not made from."""
    hosts = fitted(runs)
    errors: dict[str, Errors] = {"none": errors_of(runs, FittedHosts({})), "fitted": errors_of(runs, hosts)}
    errors |= {how: left_out(runs, by) for how, by in ways(runs).items()}
    groups = len({run.group for run in runs})
    made_by = f"tests/evidence/hosts.py on {len(runs)} served runs of {groups} models on systems"
    table = FigureSource(read_off="fitted by tests/evidence/hosts.py on served runs", table="serving_silicon")
    found = replace(hosts, widths=widths(runs, errors), made_by=made_by, source=table, known=known_of(runs))
    return HostFit(found, tuple(runs), errors)


def as_values(hosts: FittedHosts) -> dict[str, object]:
    """Fitted hosts as their file has them."""
    return {
        "made_by": hosts.made_by,
        "source": {name: text for name, text in asdict(hosts.source).items() if text},
        "engines": {name: asdict(each) for name, each in hosts.engines.items()},
        "widths": {name: dict(each) for name, each in hosts.widths.items()},
        "known": {name: list(each) for name, each in hosts.known.items()},
    }


def _score(errors: Sequence[float]) -> dict[str, float]:
    off = np.abs(np.expm1(-np.asarray(errors))) * 100
    return {
        "rows": len(errors),
        "median": round(float(np.median(off)), 1),
        "mean": round(float(off.mean()), 1),
        "p90": round(float(np.quantile(off, NINETY)), 1),
        "bias": round(float(np.expm1(-np.median(errors)) * 100), 1),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=Path, nargs="+")
    parser.add_argument("--rows", type=int, default=3000, help="the first so many")
    parser.add_argument("--runs", type=Path, help="predictions without a host: read where it is there, else written")
    parser.add_argument("--output", type=Path, help="where figures of hosts are written")
    parser.add_argument("--scores", type=Path, help="where scores are written")
    chosen = parser.parse_args(arguments)
    tables = [read_table(table, setting="tables") for table in chosen.tables]
    rows = [row for table in tables for row in table.rows][: chosen.rows]
    refused = [row for table in tables for row in table.by_outcome]
    if chosen.runs and chosen.runs.is_file():
        predicted = read_runs(chosen.runs)
    else:
        predicted = observed((*rows, *refused), workbench(Sources()).validation())
        if chosen.runs:
            write_runs(chosen.runs, predicted)
    made = host_fit(runs_of(rows, predicted))
    scores = made.scores()
    scores[WITH_REFUSED] = {"fitted": _scored(errors_of(runs_of((*rows, *refused), predicted), made.hosts))}
    for path, values in ((chosen.output, as_values(made.hosts)), (chosen.scores, scores)):
        if path:
            path.write_text(json.dumps(values, indent=1) + "\n")
    for name, of in scores.items():
        for quantity in QUANTITIES:
            said = (f"{how} {each[quantity]['median']:.1f} / {each[quantity]['p90']:.1f}" for how, each in of.items())
            print(f"{name}: {quantity}, {of['fitted'][quantity]['rows']} rows: {', '.join(said)}")


def _scored(errors: Errors) -> dict[str, dict[str, float]]:
    return {name: _score([of[name] for of in errors.values()]) for name in QUANTITIES}


if __name__ == "__main__":
    main()
