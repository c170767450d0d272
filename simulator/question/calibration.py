"""What whole steps of known runs say of predicted times: effects on families of ops, and how far off answers are.

The time of a family of ops in a step is multiplied by ``exp`` of the sum of effects: of all runs, of the framework, the
chip, the format, the regime (training, prefill or decode), and of pairs of them. Effects are drawn towards 0, which is
physics: what nobody ran has the sum of what is known and a wide interval. ``opcast calibrate`` fits them
(:mod:`..validation.calibration`) and writes the file that is read here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from statistics import median

from ...datasets.devices import Device
from ...datasets.loading import choice, load
from ...datasets.ops import KINDS, Op
from ...datasets.reading import read_json
from .errors import PlanError

SHIPPED = Path(__file__).resolve().parents[2] / "conf" / "calibration.json"
NONE, USUAL = "none", "shipped"
FAMILIES = ("gemm", "attention", "experts", "collective_inside", "collective_between", "rest", "host")
EXPERTS = ("grouped_gemm", "fused_moe")
PARTS = ("framework", "chip", "format", "regime")  # what a question is made of
PAIRS = (("framework", "chip"), ("framework", "format"), ("framework", "regime"), ("chip", "format"))
MOST = 10.0  # that an effect, a width (both ln) or a factor of a calibration may be
UNKNOWN = ("", "pair", "chip", "framework", "both")  # what of framework and chip no run had, the least first


@dataclass(frozen=True)
class Effect:
    """ln of what multiplies the times of a ``family`` where a question is ``of`` something (``framework=megatron``).

    ``error`` is its standard error, ``rows`` are the runs that it rests on.
    """

    family: str
    of: str
    value: float
    error: float
    rows: int

    def __post_init__(self) -> None:
        choice(PlanError, "family of a calibration's effect", self.family, FAMILIES)
        if not abs(self.value) <= MOST:
            what = f"calibration: {self.family} of {self.of}: value={self.value!r}"
            raise PlanError(f"{what} must be a number from {-MOST:g} to {MOST:g}")


@dataclass(frozen=True)
class Calibration:
    """All effects, factors on the ``host`` by framework, and ``widths``: what 90 % of the errors of runs are within.

    Widths are ln of measured over predicted, each way: by framework and chip that runs are known of
    (``megatron hopper-132``, with `` experts`` for mixtures of experts), and by what of the two is not
    (:data:`UNKNOWN`) from runs that were left out.
    """

    effects: tuple[Effect, ...] = ()
    host: Mapping[str, float] = field(default_factory=dict)
    widths: Mapping[str, float] = field(default_factory=dict)
    made_by: str = ""
    rows: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for what, values, least in (("host", self.host, 1 / MOST), ("widths", self.widths, 0.0)):
            for name, value in values.items():
                if not least <= value <= MOST:
                    raise PlanError(f"calibration: {what}.{name}={value!r} must be a number from {least:g} to {MOST:g}")

    @cached_property
    def known(self) -> Mapping[str, Mapping[str, float]]:
        """Effects by what they are of, then by family."""
        made: dict[str, dict[str, float]] = {}
        for each in self.effects:
            made.setdefault(each.of, {})[each.family] = each.value
        return made


@dataclass(frozen=True)
class RunKind:
    """What a question is made of, as effects name it."""

    framework: str
    chip: str
    format: str
    regime: str

    @property
    def levels(self) -> tuple[str, ...]:
        """What effects of this question are of."""
        own = [f"{part}={getattr(self, part)}" for part in PARTS]
        pairs = [f"{a}={getattr(self, a)} {b}={getattr(self, b)}" for a, b in PAIRS]
        return ("all", *own, *pairs)


@dataclass(frozen=True)
class StepCalibration:
    """What a calibration says of a question: factors by family, and what of framework and chip no run had.

    90 % of answers are within ``width`` (ln, each way; None where no run says so), those for a mixture of experts
    within ``width_experts``.
    """

    factors: Mapping[str, float] = field(default_factory=dict)
    width: float | None = None
    width_experts: float | None = None
    unknown: str = ""


def run_kind(framework: str, device: Device, format: str, regime: str) -> RunKind:
    """The levels of a question. Formats of 16 bits count as one."""
    return RunKind(framework, chip_of(device), "16bit" if format in ("bf16", "fp16") else format, regime)


def chip_of(device: Device) -> str:
    """What devices share that have kernels and clocks in common, whatever memory stands beside."""
    return f"{device.architecture}-{device.compute_units}"


def calibrated(calibration: Calibration, setting: RunKind) -> StepCalibration:
    """What a calibration says of a question."""
    if not calibration.effects:
        return StepCalibration()
    known = calibration.widths
    unknown = unknown_of(setting, known)
    names = (pair_of(setting.framework, setting.chip, experts) for experts in (False, True))
    dense = known.get(next(names), max(known[unknown], _usual_width(setting.framework, known)))
    experts = known.get(next(names), max(dense, known[unknown]))
    return StepCalibration(factors(calibration, setting), dense, experts, unknown)


def _usual_width(framework: str, widths: Mapping[str, float]) -> float:
    """The median width of a framework on the chips that runs are known of: on others it is no surer. 0 without any."""
    own = [width for name, width in widths.items() if name.split(" ")[0] == framework and name.count(" ") == 1]
    return median(own) if own else 0.0


def pair_of(framework: str, chip: str, experts: bool) -> str:
    """What the width of a framework on a chip is called: mixtures of experts have their own."""
    return f"{framework} {chip}{' experts' * experts}"


def factors(calibration: Calibration, setting: RunKind) -> dict[str, float]:
    """What multiplies the times of each family in a question."""
    found: dict[str, float] = {}
    for level in setting.levels:
        for family, value in calibration.known.get(level, {}).items():
            found[family] = found.get(family, 0.0) + value
    made = {family: math.exp(value) for family, value in found.items()}
    return made | {"host": made.get("host", 1.0) * calibration.host.get(setting.framework, 1.0)}


def unknown_of(setting: RunKind, pairs: Mapping[str, float]) -> str:
    """Of :data:`UNKNOWN`: what of a question's framework and chip is in no pair that runs are known of."""
    known = [name.split(" ") for name in pairs if " " in name]
    if any(each[:2] == [setting.framework, setting.chip] for each in known):
        return ""
    missing = setting.framework not in {each[0] for each in known}, setting.chip not in {each[1] for each in known}
    return {(False, False): "pair", (False, True): "chip", (True, False): "framework", (True, True): "both"}[missing]


def family_of(op: Op | None) -> str:
    """The family of :data:`FAMILIES` whose effects an op follows."""
    if op is None:
        return "rest"
    family = KINDS[op.kind].family
    if family in ("collective", "expert_parallel"):
        return "collective_inside" if op.ranks <= op.ranks_per_node else "collective_between"
    return "experts" if op.kind in EXPERTS else family if family in ("gemm", "attention") else "rest"


@lru_cache(maxsize=8)
def load_calibration(name: str) -> Calibration:
    """The calibration that ships, none, or that of a file. PlanError for what is no calibration."""
    if name == NONE:
        return Calibration()
    path = SHIPPED if name == USUAL else Path(name).expanduser()
    try:
        values = read_json(path, PlanError)
    except PlanError as error:
        ways = f"{USUAL}, {NONE} or a file that `opcast calibrate` wrote"
        raise PlanError(f"calibration={name} does not exist or is no JSON ({error}): take {ways}") from None
    found = load(Calibration, values, PlanError, f"calibration={name}")
    missing = [each for each in UNKNOWN if each not in found.widths]
    if found.effects and missing:
        raise PlanError(f"calibration={name} has no width for {missing[0]!r}; make it with `opcast calibrate`")
    return found
