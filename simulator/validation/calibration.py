"""Effects on the times of families of ops, fitted on known runs: the content of ``conf/calibration.json``.

The model of a run is ``ln measured = ln(sum of parts x exp(sum of effects)) + error``. Effects are normal around 0 with
the standard deviations of ``PRIOR``, times that of their family in ``LOOSE``; errors follow Student's t, so that a few
runs that nothing explains move little. What an earlier calibration knew is where its effects start: they are normal
around what it says, with its standard errors. What one source is off by as a whole (its machines, clocks and versions)
is no effect of a framework or a chip: where there are several, each has effects of its own, which are fitted with the
others and not kept. The mode is found by Gauss-Newton with the weights of an expectation step (Lange, Little and Taylor
1989), standard errors from the curvature there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from ..question.calibration import FIXED, Calibration, Effect, StepCalibration, factors
from .intervals import NINETY, NOTHING
from .observed import ObservedStep, table_of

# Standard deviations of effects by what they are of. What is left out scores alike from half to twice of them, and
# worse with other pairs than of a framework on a chip (docs/findings.md)
PRIOR = {"all": 0.02, "framework": 0.08, "chip": 0.03, "format": 0.02, "regime": 0.02}
PRIOR_OF_PAIR = 0.04  # of a framework on a chip, with the others
# Of a source, which no question is of. With 0, 0.04, 0.08, 0.12, 0.16 and 0.24 half of the runs of the half that is
# looked at are within 9.9, 9.7, 8.9, 8.5, 8.2 and 8.0 % (their table left out; 9.5 to 8.2 their framework)
PRIOR_OF_SOURCE = 0.16
SOURCE = "source"
LOOSE = {"gemm": 1.0, "attention": 1.5, "experts": 1.5, "rest": 1.5, "collective_inside": 1.5, "host": 0.7}
LOOSE |= {"collective_between": 1.0}
FREEDOM = 4.0  # degrees of freedom of the errors
ERROR = 0.05  # their scale
LEAST_SHARE = 0.003  # a part of a step that small says nothing
LONGEST, STEPS, ENOUGH = 0.3, 80, 1e-4  # of the search for the mode: longest step (ln), steps, and when it ends
LEAST_ERROR = 0.001  # ln: no effect is known better
DIGITS = 4


@dataclass(frozen=True)
class Fit:
    """Effects and standard errors by (of, family), and how many rows each rests on."""

    keys: tuple[tuple[str, str], ...]
    value: np.ndarray
    error: np.ndarray
    rows: np.ndarray

    def effects(self) -> tuple[Effect, ...]:
        """The effects of a calibration file, those of all runs first."""
        return tuple(
            Effect(family, of, round(float(value), DIGITS), round(float(error), DIGITS), int(rows))
            for (of, family), value, error, rows in zip(self.keys, self.value, self.error, self.rows, strict=True)
            if not of.startswith(f"{SOURCE}=")
        )


def fit(observed: Sequence[ObservedStep], start: Calibration = NOTHING) -> Fit:
    """The most probable effects of the runs, given what was known at the ``start``."""
    from scipy.sparse import csr_array

    several = not start.effects and len({run.table for run in observed}) > 1
    share, row, levels = _cells(observed, several)  # shares without what was applied to them already
    log_ratios = np.log([run.measured / run.predicted for run in observed])
    weight = table_of(observed)
    keys = sorted({key for cell in levels for key in cell}, key=lambda key: (_rank(key[0]), key))
    column_of = {key: at for at, key in enumerate(keys)}
    at = np.repeat(np.arange(len(levels)), [len(cell) for cell in levels])
    column = [column_of[key] for cell in levels for key in cell]
    design = csr_array((np.ones(len(column)), (at, column)), shape=(len(levels), len(keys)))
    runs = csr_array((np.ones(len(row)), (row, np.arange(len(row)))), shape=(len(observed), len(row)))
    before = {(effect.of, effect.family): effect for effect in start.effects}
    errors = (max(before[key].error, LEAST_ERROR) if key in before else _prior(key) for key in keys)
    prior = np.fromiter(errors, float) ** -2
    begun = np.array([before[key].value if key in before else 0.0 for key in keys])
    beta = begun.copy()
    for _ in range(STEPS):
        parts = share * np.exp(design @ beta)
        total = runs @ parts
        slope = (runs @ (design * (parts / total[row])[:, None])).toarray()
        error = np.log(total) - log_ratios
        trust = weight * (FREEDOM + 1.0) / (FREEDOM + (error / ERROR) ** 2) / ERROR**2
        curvature = (slope * trust[:, None]).T @ slope + np.diag(prior)
        step = np.linalg.solve(curvature, slope.T @ (trust * error) + (beta - begun) * prior)
        beta -= np.clip(step, -LONGEST, LONGEST)
        if np.abs(step).max(initial=0.0) < ENOUGH:
            break
    rows = (slope > LEAST_SHARE).sum(axis=0)
    return Fit(tuple(keys), beta, np.sqrt(np.diag(np.linalg.inv(curvature))), rows)


def known_of(observed: Sequence[ObservedStep], start: Calibration = NOTHING) -> Calibration:
    """Effects of the runs, and of the ``start`` where they say nothing."""
    by_cell = {(effect.of, effect.family): effect for effect in start.effects}
    for effect in fit(observed, start).effects() if observed else ():
        earlier = by_cell.get((effect.of, effect.family))
        by_cell[effect.of, effect.family] = replace(effect, rows=effect.rows + earlier.rows) if earlier else effect
    return replace(start, effects=tuple(sorted(by_cell.values(), key=lambda effect: (_rank(effect.of), effect.family))))


def _cells(
    observed: Sequence[ObservedStep], by_source: bool
) -> tuple[np.ndarray, np.ndarray, list[list[tuple[str, str]]]]:
    """All parts of all runs: their shares, the runs they belong to, and the effects that act on them [parts].

    ``by_source`` adds those of each source: runs that join an earlier calibration are of its user's own.
    """
    shares, rows, levels = [], [], []
    for at, step in enumerate(observed):
        for (cell, regime), share in step.parts.items():
            shares.append(share * np.exp(-step.applied.get((cell, regime), 0.0)))
            rows.append(at)
            fitted = share > LEAST_SHARE and cell != FIXED
            family, _, format = cell.partition(" ")
            source = (f"{SOURCE}={step.table}",) if by_source else ()
            acting = (*step.settings[regime].levels(format), *source)
            levels.append([(of, family) for of in acting] if fitted else [])
    return np.array(shares), np.array(rows), levels


def _rank(of: str) -> tuple[int, str]:
    return (0 if of == "all" else 1 + of.count("="), of)


def _prior(key: tuple[str, str]) -> float:
    of, family = key
    of_one = {**PRIOR, SOURCE: PRIOR_OF_SOURCE}
    return (PRIOR_OF_PAIR if " " in of else of_one[of.partition("=")[0]]) * LOOSE[family]


def corrected(step: ObservedStep, calibration: Calibration) -> float:
    """ln of measured over predicted once a calibration is applied to the parts of a run, to first order."""
    total = 0.0
    by_regime = {regime: StepCalibration(factors(calibration, of)) for regime, of in step.settings.items()}
    for (cell, regime), share in step.parts.items():
        factor = by_regime[regime].factor(cell)
        relative = factor / calibration.host.get(step.framework, 1.0) if cell == "host" else factor
        total += share * relative / np.exp(step.applied.get((cell, regime), 0.0))
    return float(np.log(step.measured / step.predicted / total))


def left_out(
    observed: Sequence[ObservedStep], by: Callable[[ObservedStep], str], start: Calibration = NOTHING
) -> dict[str, float]:
    """Errors (ln of measured over answered) by row, those of each group under effects fitted without it."""
    errors: dict[str, float] = {}
    for name in sorted({by(step) for step in observed}):
        calibration = known_of([step for step in observed if by(step) != name], start)
        errors |= {step.id: corrected(step, calibration) for step in observed if by(step) == name}
    return errors


def halves(observed: Sequence[ObservedStep], start: Calibration = NOTHING) -> dict[str, float]:
    """Errors by row, each half of the groups under effects fitted on the other."""
    return left_out(observed, half_of, start)


def half_of(step: ObservedStep, salt: str = "") -> str:
    """The half of all groups that a run is in: "0" or "1", by a hash of its group's name."""
    return str(hashlib.sha256((salt + step.group).encode()).digest()[0] % 2)


def score(errors: Iterable[float]) -> dict[str, float]:
    """Median, mean, 90th percentile and bias of errors in percent; ``errors`` are ln of measured over answered."""
    residuals = np.array(list(errors))
    off = 100.0 * np.abs(np.expm1(-residuals))
    return {
        "rows": len(residuals),
        "median": round(float(np.median(off)), 1),
        "mean": round(float(off.mean()), 1),
        "p90": round(float(np.quantile(off, NINETY)), 1),
        "bias": round(100.0 * float(np.expm1(-np.median(residuals))), 1),
    }


def as_json(calibration: Calibration) -> str:
    """The text of a calibration file: an effect a line."""
    values = asdict(calibration)
    lines = ",\n".join("  " + json.dumps(effect) for effect in values.pop("effects"))
    other_fields = json.dumps(values, indent=1)[1:]
    return '{\n "effects": [\n' + lines + "\n ]," + other_fields + "\n"
