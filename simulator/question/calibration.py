"""What whole steps of known runs say of predicted times: effects on families of ops, and how far off answers are.

The time of a family of ops in a step is multiplied by ``exp`` of the sum of effects: of all runs, of the framework, the
chip, the format, the regime (:func:`regime_of`), and of the framework on the chip. A format is that of the op: what a
plan leaves in 16 bits follows 16-bit products, whatever the others run in; families of :data:`WITHOUT_FORMAT` move
bytes and have none. Effects are drawn towards 0, which is physics: what nobody ran has the sum of what is known and a
wide interval. ``opcast calibrate`` fits them (:mod:`..validation.calibration`) and writes the file that is read here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from statistics import median

from ...datasets.devices import Device
from ...datasets.loading import choice, load, number
from ...datasets.ops import KINDS, Op
from ...datasets.reading import read_json
from .errors import PlanError
from .learned_steps import LearnedSteps

SHIPPED = Path(__file__).resolve().parents[2] / "conf" / "calibration.json"
NONE, USUAL, OWN = "none", "shipped", "own"
OWN_FILE = "calibration.json"
FAMILIES = ("gemm", "attention", "experts", "collective_inside", "collective_between", "rest", "host")
ACROSS = "_across"
WITHOUT_FORMAT = ("collective_inside", "collective_between", "rest", "host")
EXPERTS = ("grouped_gemm", "fused_moe")
PARTS = ("framework", "chip", "format", "regime")  # what an op of a question is made of
MOST = 10.0  # that an effect, a width (both ln) or a factor of a calibration may be
KIND = "kind"
UNKNOWN = ("", KIND, "pair", "chip", "framework", "both")  # what of a question no run had, the least first
KINDS_OF_STEP = ("train", "prefill", "decode")
FIXED = "fixed"  # what follows no family: sends between stages, data loading, gaps of CUDA graphs
SPREAD_BASE = "base"


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

    Widths are ln of measured over predicted, each way, of a step of usual make-up: by framework, chip and kind of step
    that runs are known of (``megatron hopper-132 train``, with `` experts`` for mixtures of experts and :data:`ACROSS`
    for tensor groups that leave their node), and by what of the three is not (:data:`UNKNOWN`) from runs whose source
    was left out. ``spread`` says how much wider a step is by what it is made of (:func:`relative_spread`).
    """

    effects: tuple[Effect, ...] = ()
    host: Mapping[str, float] = field(default_factory=dict)
    widths: Mapping[str, float] = field(default_factory=dict)
    spread: Mapping[str, float] = field(default_factory=dict)
    made_by: str = ""
    rows: Mapping[str, int] = field(default_factory=dict)
    # what logs of engines say (:mod:`..serving.learned`); tables of iterations are made, and kept, without it
    steps: tuple[LearnedSteps, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        for what, values, least in (("host", self.host, 1 / MOST), ("widths", self.widths, 0.0)):
            for name, value in values.items():
                if not least <= value <= MOST:
                    raise PlanError(f"calibration: {what}.{name}={value!r} must be a number from {least:g} to {MOST:g}")
        for name in (SPREAD_BASE, *FAMILIES, FIXED) if self.spread else ():
            number(PlanError, f"calibration: spread.{name}", self.spread.get(name))

    @cached_property
    def formats(self) -> tuple[str, ...]:
        """Formats that effects are of."""
        named = (of.rpartition("format=")[2] for of in self.known if "format=" in of)
        return tuple(dict.fromkeys(named))

    @cached_property
    def known(self) -> Mapping[str, Mapping[str, float]]:
        """Effects by what they are of, then by family."""
        by_level: dict[str, dict[str, float]] = {}
        for effect in self.effects:
            by_level.setdefault(effect.of, {})[effect.family] = effect.value
        return by_level


@dataclass(frozen=True)
class RunKind:
    """What a question is made of, as effects name it."""

    framework: str
    chip: str
    regime: str

    @property
    def across(self) -> bool:
        """Whether tensor groups leave their node."""
        return self.regime.endswith(ACROSS)

    @property
    def kind(self) -> str:
        """Of :data:`KINDS_OF_STEP`."""
        return self.regime.removesuffix(ACROSS)

    def levels(self, format: str = "") -> tuple[str, ...]:
        """What effects on ops of a format are of; those that have none know no format."""
        values = zip(PARTS, (self.framework, self.chip, format, self.regime), strict=True)
        named = {part: f"{part}={value}" for part, value in values if value}
        pair = [f"{named['framework']} {named['chip']}"] if "framework" in named and "chip" in named else []
        return ("all", *named.values(), *pair)


@dataclass(frozen=True)
class StepCalibration:
    """What a calibration says of a question: factors by cell, and what of framework, chip and kind of step no run had.

    Cells are families with the format of their ops (:func:`cell_of`), and families alone for formats of no known run.
    90 % of answers are within ``width`` (ln, each way; None where no run says so), those for a mixture of experts
    within ``width_experts``, both times the ``spread`` of what the step is made of (:func:`relative_spread`).
    """

    factors: Mapping[str, float] = field(default_factory=dict)
    width: float | None = None
    width_experts: float | None = None
    unknown: str = ""
    spread: Mapping[str, float] = field(default_factory=dict)

    def factor(self, cell: str) -> float:
        """What multiplies the times of a cell: its own, else that of its family; else 1."""
        return self.factors.get(cell, self.factors.get(cell.partition(" ")[0], 1.0))


def run_kind(framework: str, device: Device, regime: str) -> RunKind:
    """What a question is made of."""
    return RunKind(framework, chip_of(device), regime)


def regime_of(kind: str, tp: int, devices_per_node: int) -> str:
    """``train``, ``prefill`` or ``decode``; with :data:`ACROSS` where tensor groups leave their node.

    Each layer then waits for the network several times, which hardly anyone runs and no effect of others explains.
    """
    return kind + ACROSS * (tp > devices_per_node)


def chip_of(device: Device) -> str:
    """What devices share that have kernels and clocks in common, whatever memory stands beside."""
    return f"{device.architecture}-{device.compute_units}"


def of_chip(calibration: Calibration, chip: str) -> Calibration:
    """Only what runs on a chip say of it, with their widths."""
    effects = tuple(effect for effect in calibration.effects if f"chip={chip}" in effect.of.split(" "))
    return replace(calibration, effects=effects, host={})


def own_calibration(home: str) -> str:
    """What is used where no calibration is named: that of one's own runs, where there is one, else what ships.

    ``opcast trace calibrate`` writes it, with all that ships in it.
    """
    path = Path(home).expanduser() / OWN_FILE
    return str(path) if path.is_file() else USUAL


def relative_spread(spread: Mapping[str, float], shares: Mapping[str, float]) -> float:
    """How many times as far off as usual a step is, whose time is made of such shares by family and :data:`FIXED`.

    Errors of one family go together, those of different families do not: shares times their spreads add in quadrature,
    with what all steps have. 1 without a spread.
    """
    if not spread:
        return 1.0
    return math.hypot(spread[SPREAD_BASE], *(spread[family] * share for family, share in shares.items()))


def calibrated(calibration: Calibration, setting: RunKind) -> StepCalibration:
    """What a calibration says of a question."""
    if not calibration.effects:
        return StepCalibration()
    widths = calibration.widths
    unknown = unknown_of(setting, widths)
    framework_width = max(widths.get(unknown, widths["pair"]), widths.get(ACROSS, 0.0) if setting.across else 0.0)
    dense = widths.get(pair_of(setting, False), max(framework_width, _usual_width(setting.framework, widths)))
    experts = widths.get(pair_of(setting, True), max(dense, framework_width))
    return StepCalibration(factors(calibration, setting), dense, experts, unknown, calibration.spread)


def _usual_width(framework: str, widths: Mapping[str, float]) -> float:
    """The median width of a framework on the chips that runs are known of: on others it is no surer. 0 without any."""
    names = ((name.split(" "), width) for name, width in widths.items())
    plain = [width for words, width in names if words[0] == framework and set(words[2:]) <= set(KINDS_OF_STEP)]
    return median(plain) if plain else 0.0


def pair_of(setting: RunKind, experts: bool) -> str:
    """What the width of a framework on a chip is called: kinds of step, experts and :data:`ACROSS` have their own."""
    beside = " experts" * experts + f" {ACROSS}" * setting.across
    return f"{setting.framework} {setting.chip} {setting.kind}{beside}"


def factors(calibration: Calibration, setting: RunKind) -> dict[str, float]:
    """What multiplies the times of each cell in a question."""
    by_family = _factors(calibration, setting.levels())
    for format in calibration.formats:
        by_format = _factors(calibration, setting.levels(format))
        by_family |= {f"{family} {format}": by_format[family] for family in by_format if family not in WITHOUT_FORMAT}
    return by_family | {"host": by_family.get("host", 1.0) * calibration.host.get(setting.framework, 1.0)}


def _factors(calibration: Calibration, levels: Iterable[str]) -> dict[str, float]:
    total: dict[str, float] = {}
    for level in levels:
        for family, value in calibration.known.get(level, {}).items():
            total[family] = total.get(family, 0.0) + value
    return {family: math.exp(value) for family, value in total.items()}


def unknown_of(setting: RunKind, pairs: Mapping[str, float]) -> str:
    """Of :data:`UNKNOWN`: what of a question's framework, chip and kind of step is in no pair that runs are known of.

    Pairs of older files name no kind: they stand for all.
    """
    runs = [name.split(" ") for name in pairs if " " in name]
    kinds = {
        words[2] if set(words[2:]) & set(KINDS_OF_STEP) else ""
        for words in runs
        if words[:2] == [setting.framework, setting.chip]
    }
    if kinds:
        return "" if kinds & {setting.kind, ""} else KIND
    missing = setting.framework not in {words[0] for words in runs}, setting.chip not in {words[1] for words in runs}
    return {(False, False): "pair", (False, True): "chip", (True, False): "framework", (True, True): "both"}[missing]


def family_of(op: Op | None) -> str:
    """The family of :data:`FAMILIES` whose effects an op follows."""
    if op is None:
        return "rest"
    family = KINDS[op.kind].family
    if family in ("collective", "expert_parallel"):
        return "collective_inside" if op.ranks <= op.ranks_per_node else "collective_between"
    return "experts" if op.kind in EXPERTS else family if family in ("gemm", "attention") else "rest"


def cell_of(op: Op | None) -> str:
    """The family of an op, with its format where effects of the family have one. Formats of 16 bits count as one."""
    family = family_of(op)
    if op is None or family in WITHOUT_FORMAT:
        return family
    return f"{family} {'16bit' if op.dtype in ('bf16', 'fp16') else op.dtype}"


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
    calibration = load(Calibration, values, PlanError, f"calibration={name}")
    missing = [gap for gap in UNKNOWN if gap not in calibration.widths and gap != KIND]
    if calibration.effects and missing:
        raise PlanError(f"calibration={name} has no width for {missing[0]!r}; make it with `opcast calibrate`")
    return calibration
