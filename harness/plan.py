"""What a campaign measures, in which order and how: a :class:`CampaignPlan`, a file that travels to the measuring node.

:func:`build_plan` makes one from a plain mapping, the content of a ``conf/campaign/*.yaml``:

``name``, ``settings``
    as in :class:`CampaignPlan` and :class:`Settings`,
``cases``
    entries; each has ``kind``, its dims as axes (:mod:`.axes`), and may have ``dtype``, ``out_dtype``, ``backend``,
    ``cache`` as further axes, and
    ``sample: N`` (N joint draws) or ``share: W`` (as many draws as fit into W's part of ``budget_s``, at ``case_s``
    each) or neither (the product of the axes, or with ``zip: true`` the dims side by side);
    ``each: [cache]`` takes the named axes in product with the draws;
    ``where``, ``max_flops``, ``max_bytes`` drop shapes,
``ops``
    explicit ops, as ``Op.to_dict`` writes them, with optional ``backend`` and ``cache``,
``first``
    explicit ops that are measured before all others, in this order: however early a campaign ends, it has them,
``exclude``
    ops that must not be measured,
``canaries``
    explicit ops that are measured again and again through the campaign, to notice drift,
``parts``
    other specifications by name, whose cases, ops and canaries this campaign has too (their settings are not used),
``dtype``, ``backend``, ``cache``, ``max_flops``, ``max_bytes``, ``case_s``
    defaults for the entries. The backend ``usual`` is what the device runs the op on as a rule (one kernel rather
    than several, which answer for eager stacks alone), ``all`` whatever can.

Plans are read with code of their own, not with :mod:`..datasets.loading`, which needs msgspec: the harness runs on a
bare node with torch, numpy and pyarrow.

A mapping ``{cpu: …, cuda: …}`` in place of any value takes the one for the device; ``device: cuda`` in an entry leaves
it out elsewhere.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from ..datasets.kernels import is_eager, package_of
from ..datasets.loading import choice, nearest
from ..datasets.ops import KINDS, LINKS, Op, OpError, kind, make_op
from ..datasets.reading import read_json
from .axes import MOST_CASES, Axis, AxisError, combine, evaluate, is_formula, joint_draws, parse_axis
from .energy import LEAST_S
from .plan_order import in_order

FORMAT = 1
CACHES = ("cold", "warm")
USUAL, ALL = "usual", "all"
FEWEST_DRAWS = 8  # of an entry, however short the budget
DRAWS_PER_CASE = 50  # tries for each wanted shape before an entry is called impossible
DEADLINE_OVER_BUDGET = 1.5
PARAMETERS = ("dtype", "out_dtype", "backend", "cache")
DEFAULTS = ("dtype", "backend", "cache", "max_flops", "max_bytes", "case_s")
ENTRY_KEYS = ("kind", "device", "sample", "share", "zip", "each", "where", *DEFAULTS, "out_dtype")
SPEC_KEYS = ("name", "settings", "cases", "ops", "first", "exclude", "canaries", "parts", "budget_s", *DEFAULTS)


class CampaignPlanError(ValueError):
    """A plan that cannot be made or read. The message says which value is wrong and what would do."""


@dataclass(frozen=True, slots=True, order=True)
class Case:
    """One measurement to make: an op on a backend, with its inputs in the cache (warm) or not (cold)."""

    op: Op
    backend: str = "torch"
    cache: str = "warm"

    @property
    def key(self) -> tuple[Op, str, str]:
        """What the store calls this case."""
        return self.op, self.backend, self.cache

    def to_dict(self) -> dict[str, Any]:
        """The op's fields, ``backend`` and ``cache``, ready for JSON."""
        return {**self.op.to_dict(), "backend": self.backend, "cache": self.cache}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Case:
        """A checked case; CampaignPlanError and OpError say what is wrong."""
        fields = dict(values)
        backend, cache = str(fields.pop("backend", "torch")), fields.pop("cache", "warm")
        choice(CampaignPlanError, "cache", cache, CACHES)
        if "kind" not in fields:
            raise CampaignPlanError(f"an op needs its kind: {dict(values)}")
        return cls(make_op(fields.pop("kind"), **fields), backend, cache)


@dataclass(frozen=True)
class Settings:
    """How a campaign measures. Those marked * do not change what is measured, so a resumed run may change them."""

    device: str = "cpu"  # cuda or cpu
    threads: int = 0  # of torch on the CPU, 0 = as many as there are physical cores
    seed: int = 0
    ci_width: float = 0.02  # wanted relative width of the median's confidence interval
    case_budget_s: float = 0.5  # time for the repetitions of one case
    energy_s: float = 0.0  # a GPU then repeats a warm call for so long, for its watts; 0 = no watts, else 1 at least
    pin: bool = True  # bind the threads to one logical processor each, where the system can
    link: str = "auto"  # that collectives cross: found out, as planned in the ops (planned), or one of LINKS
    formats: str = "auto"  # bf16 becomes what the device has units for, or stays as planned in the ops (planned)
    max_bytes: int = 0  # memory a case may take, 0 = what is free
    case_timeout_s: float = 120.0  # * a case that takes longer is killed
    compile_timeout_s: float = 900.0  # * the same of a first call, at which a package compiles its kernel
    start_timeout_s: float = 300.0  # * a worker that is not ready by then is killed
    batch_size: int = 24  # * cases between two writes
    canary_every: int = 200  # * cases between two rounds of canaries
    # * measuring stops after this long, once FIRST_OF_KIND cases of each kind are in, and can be resumed; 0 = never
    deadline_s: float = 0.0

    OPERATIONAL = ("case_timeout_s", "compile_timeout_s", "start_timeout_s", "batch_size", "canary_every", "deadline_s")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Settings:
        """Checked settings; CampaignPlanError names an unknown or impossible one."""
        types: dict[str, type] = {f.name: type(f.default) for f in dataclasses.fields(cls)}
        for name, value in values.items():
            _check_known(name, types, "settings")
            expected = types[name]
            fits = isinstance(value, expected) or (expected is float and isinstance(value, int))
            if not fits or (isinstance(value, bool) and expected is not bool):
                raise CampaignPlanError(f"settings.{name}={value!r} must be of type {expected.__name__}")
            if expected in (int, float) and not 0 <= value < float("inf"):
                raise CampaignPlanError(f"settings.{name}={value} must be a number of at least 0")
        settings = cls(**{name: types[name](value) for name, value in values.items()})
        if settings.device not in ("cpu", "cuda"):
            raise CampaignPlanError(f"settings.device={settings.device!r} must be cpu or cuda")
        if settings.link not in ("auto", "planned", *LINKS):
            raise CampaignPlanError(
                f"settings.link={settings.link!r} must be auto, planned or one of {', '.join(LINKS)}"
            )
        choice(CampaignPlanError, "settings.formats", settings.formats, ("auto", "planned"))
        if 0 < settings.energy_s < LEAST_S:
            raise CampaignPlanError(
                f"settings.energy_s={settings.energy_s:g} is too short for the energy counter: "
                f"take {LEAST_S:g} or more, or 0"
            )
        timeouts = [name for name in types if name.endswith("timeout_s")]
        for name in ("ci_width", "case_budget_s", "batch_size", *timeouts):
            if not getattr(settings, name):
                raise CampaignPlanError(f"settings.{name}=0 must be above 0")
        return settings


@dataclass(frozen=True)
class Batch:
    """Cases that go to the worker and into the store together. ``round`` numbers a batch of canaries from 1."""

    cases: tuple[Case, ...]
    round: int = 0


@dataclass(frozen=True)
class CampaignPlan:
    """Cases in the order in which they run, canaries to repeat between them, and settings."""

    name: str
    cases: tuple[Case, ...]
    canaries: tuple[Case, ...] = ()
    settings: Settings = field(default_factory=Settings)

    @property
    def identity(self) -> str:
        """A hash of all that decides what is measured; equal for plans that differ in operational settings only."""
        settings = dataclasses.asdict(self.settings)
        for name in Settings.OPERATIONAL:
            del settings[name]
        cases = ([case.to_dict() for case in sorted(group)] for group in (self.cases, self.canaries))
        content = [self.name, settings, *cases]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    def batches(self) -> list[Batch]:
        """The cases cut into batches of one kind each, and a round of canaries before, between and after them."""
        made: list[Batch] = []
        since = self.settings.canary_every
        rounds = itertools.count(1)

        def canaries() -> Batch:
            return Batch(self.canaries, next(rounds))

        has_canaries = bool(self.canaries and self.settings.canary_every)
        for group in _runs(self.cases, self.settings.batch_size):
            if has_canaries and since >= self.settings.canary_every:
                made.append(canaries())
                since = 0
            made.append(Batch(group))
            since += len(group)
        return [*made, canaries()] if has_canaries and made else made

    def to_json(self) -> str:
        """The plan as text; :meth:`from_json` reads it back."""
        return json.dumps(
            {
                "format": FORMAT,
                "name": self.name,
                "settings": dataclasses.asdict(self.settings),
                "canaries": [case.to_dict() for case in self.canaries],
                "cases": [case.to_dict() for case in self.cases],
            }
        )

    @classmethod
    def from_json(cls, text: str | Path) -> CampaignPlan:
        """A plan from its text or file; CampaignPlanError when it is damaged or written by a newer version."""
        try:
            values = read_json(text, CampaignPlanError, "the plan")
            made_by = values["format"]
            if made_by != FORMAT:
                raise CampaignPlanError(f"the plan has format {made_by}, this version reads {FORMAT}: update opcast")
            _check_count(len(values["cases"]) + len(values["canaries"]), "the plan")
            return cls(
                _checked_name(values["name"]),
                tuple(map(Case.from_dict, values["cases"])),
                tuple(map(Case.from_dict, values["canaries"])),
                Settings.from_dict(values["settings"]),
            )
        except (KeyError, TypeError, AttributeError, OpError) as error:
            raise CampaignPlanError(f"not a plan: {type(error).__name__}: {error}") from None


def _runs(cases: Sequence[Case], size: int) -> Iterator[tuple[Case, ...]]:
    for _, run in itertools.groupby(cases, key=lambda case: case.op.kind):
        tail = tuple(run)
        for start in range(0, len(tail), size):
            yield tail[start : start + size]


def _check_known(name: str, names: Iterable[str], where: str) -> None:
    if name not in names:
        raise CampaignPlanError(f"{where} has no {name!r}; {nearest(name, names, 'known:')}")


def _checked_name(name: Any) -> str:
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise CampaignPlanError(f"name={name!r} must be a word of lower case letters, digits and underscores")
    return name


# --- building ------------------------------------------------------------------------------------------


def build_plan(spec: Mapping[str, Any]) -> CampaignPlan:
    """The plan that a specification (see the module) describes: deterministic, without duplicates, shuffled.

    Raises CampaignPlanError, or OpError for a wrong dim or dtype, naming the value.
    """
    parts = spec.get("parts") or {} if isinstance(spec, Mapping) else None
    if not isinstance(parts, Mapping) or not all(isinstance(mapping, Mapping) for mapping in (spec, *parts.values())):
        raise CampaignPlanError("a campaign, and each of its parts, must be a mapping with `cases` or `ops`")
    device = _device(spec)
    settings = _settings(spec, device)
    specs = [_checked_spec(part_spec, device) for part_spec in (spec, *parts.values())]
    name = _checked_name(spec.get("name", "campaign"))
    cases: set[Case] = set()
    for case in itertools.chain.from_iterable(_cases(part_spec, settings) for part_spec in specs):
        cases.add(case)
        _check_count(len(cases), f"campaign {name!r}")
    excluded = {case.op for part_spec in specs for case in _explicit(part_spec.get("exclude"), part_spec, settings)}
    canaries = [case for part_spec in specs for case in _explicit(part_spec.get("canaries"), part_spec, settings)]
    remaining = [case for case in sorted(cases) if case.op not in excluded]
    if not remaining:
        raise CampaignPlanError(f"campaign {name!r} has no cases: loosen its limits or give it `cases` or `ops`")
    first = [case for part_spec in specs for case in _explicit(part_spec.get("first"), part_spec, settings)]
    others = in_order(remaining, settings.seed, settings.batch_size)
    ordered = dict.fromkeys([*(case for case in first if case.op not in excluded), *others])
    return CampaignPlan(name, tuple(ordered), tuple(dict.fromkeys(canaries)), settings)


def _check_count(count: int, what: str) -> None:
    if count > MOST_CASES:
        raise CampaignPlanError(f"{what} has more than the {MOST_CASES:,} cases that are measured: give it a `sample`")


def _checked_spec(spec: Mapping[str, Any], device: str) -> dict[str, Any]:
    """A specification with known keys only, and its values for the device."""
    for name in spec:
        _check_known(name, SPEC_KEYS, "campaign")
    chosen = {name: _for_device(value, device) for name, value in spec.items()}
    for name in ("cases", "ops", "first", "canaries", "exclude"):
        entries = chosen.get(name) or ()
        if not isinstance(entries, Sequence) or not all(isinstance(entry, Mapping) for entry in entries):
            raise CampaignPlanError(f"campaign.{name}={entries} must be a list of {{kind: gemm, …}}")
    return chosen


def _cases(spec: Mapping[str, Any], settings: Settings) -> Iterator[Case]:
    """The cases of a specification's entries and its explicit ops."""
    entries = [
        _entry(spec, {key: _for_device(value, settings.device) for key, value in values.items()})
        for values in spec.get("cases") or ()
        if values.get("device", settings.device) == settings.device
    ]
    for number, (values, count) in enumerate(zip(entries, _counts(spec, entries), strict=True)):
        random = Random(f"{settings.seed} {values['kind']} {_nth_of_kind(entries, number)}")
        try:
            yield from _expand(values, count, settings, random)
        except AxisError as error:
            raise CampaignPlanError(f"{values['kind']}: {error}") from None
    yield from _explicit(spec.get("ops"), spec, settings)


def _device(spec: Mapping[str, Any]) -> str:
    device = (spec.get("settings") or {}).get("device", Settings.device)
    if device == "auto":
        from .environment import default_device

        return default_device()
    return str(device)


def _for_device(value: Any, device: str) -> Any:
    """The value itself, or of a mapping ``{cpu: …, cuda: …}`` the one for the device."""
    by_device = isinstance(value, Mapping) and value and set(value) <= {"cpu", "cuda"}
    if not by_device:
        return value
    if device not in value:
        raise CampaignPlanError(f"{dict(value)} has no value for device {device}")
    return value[device]


def _settings(spec: Mapping[str, Any], device: str) -> Settings:
    values = {name: _for_device(value, device) for name, value in (spec.get("settings") or {}).items()}
    values["device"] = device
    if "budget_s" in spec:
        values.setdefault("deadline_s", DEADLINE_OVER_BUDGET * _number(spec, "budget_s"))
    return Settings.from_dict(values)


def _number(values: Mapping[str, Any], name: str) -> float:
    value = values[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise CampaignPlanError(f"{name}={value!r} must be a number above 0")
    return float(value)


def _entry(spec: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """An entry with the campaign's defaults; CampaignPlanError when a key is no dim of its kind."""
    if "kind" not in values:
        raise CampaignPlanError(f"an entry of `cases` needs a kind: {dict(values)}")
    dims = kind(values["kind"]).names
    for key in values:
        for name in str(key).split(","):
            if not name.strip().startswith("_"):
                _check_known(name.strip(), (*dims, *ENTRY_KEYS), f"the entry of {values['kind']}")
    return {**{name: spec[name] for name in DEFAULTS if name in spec}, **values}


def _nth_of_kind(entries: Sequence[Mapping[str, Any]], number: int) -> int:
    return sum(entry["kind"] == entries[number]["kind"] for entry in entries[:number])


def _counts(spec: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> list[int]:
    """How many shapes to draw for each entry; 0 for one that is a product."""
    shares = [_number(entry, "share") if "share" in entry else 0.0 for entry in entries]
    if any(shares) and "budget_s" not in spec:
        raise CampaignPlanError("entries with `share` need the campaign's budget_s")
    counts = []
    for entry, share in zip(entries, shares, strict=True):
        if share:
            seconds = _number(spec, "budget_s") * share / sum(shares)
            counts.append(max(FEWEST_DRAWS, round(seconds / _number({"case_s": 1.0, **entry}, "case_s"))))
        else:
            counts.append(int(_number(entry, "sample")) if "sample" in entry else 0)
        _check_count(counts[-1], f"the entry of {entry['kind']}")
    return counts


def _expand(entry: Mapping[str, Any], count: int, settings: Settings, random: Random) -> Iterator[Case]:
    """The cases of one entry: ``count`` of them for a sample, all combinations when 0."""
    axes, formulas = _axes(entry)
    every_value = entry.get("each") or (PARAMETERS if entry.get("zip") else ())
    for name in entry.get("each") or ():
        _check_known(name, [n for axis in axes for n in axis.names], f"`each` of {entry['kind']}")
    crossed = [axis for axis in axes if set(axis.names) & set(every_value)]
    free_axes = [axis for axis in axes if axis not in crossed]
    fixed = list(combine(crossed, random, zipped=False))
    if not count:
        rows: Iterator[dict[str, Any]] = combine(free_axes, random, bool(entry.get("zip")))
        for row, extra in itertools.product(rows, fixed):
            yield from _admitted({**row, **extra}, formulas, entry, settings)
        return
    chosen: dict[Case, None] = {}
    target = max(1, round(count / len(fixed)))
    hits = 0
    for row in itertools.islice(joint_draws(free_axes, target, random), target * DRAWS_PER_CASE):
        before = len(chosen)
        for extra in fixed:
            chosen.update(dict.fromkeys(_admitted({**row, **extra}, formulas, entry, settings)))
        hits += len(chosen) > before
        if hits == target:
            break
    if not chosen:
        raise CampaignPlanError(f"no draw for {entry['kind']} passes its limits: check where, max_flops and max_bytes")
    yield from chosen


def _axes(entry: Mapping[str, Any]) -> tuple[list[Axis], dict[str, str]]:
    control = set(ENTRY_KEYS) - set(PARAMETERS)
    defaults = {"dtype": "bf16", "backend": USUAL, "cache": "warm", **entry}
    overridden = {n.strip() for key in entry if "," in key for n in key.split(",")}
    defaults = {key: value for key, value in defaults.items() if key not in control and key not in overridden}
    formulas = {key: value for key, value in defaults.items() if is_formula(value)}
    return [parse_axis(key, value) for key, value in defaults.items() if key not in formulas], formulas


def _admitted(
    row: dict[str, Any], formulas: Mapping[str, str], entry: Mapping[str, Any], settings: Settings
) -> Iterator[Case]:
    """The cases of one combination of values, if it passes the entry's limits."""
    for name, formula in formulas.items():
        row[name] = evaluate(formula, row)
    conditions = entry.get("where") or ()
    if not all(evaluate(text, row) for text in ([conditions] if isinstance(conditions, str) else conditions)):
        return
    backend, cache = row.pop("backend"), row.pop("cache")
    op = make_op(entry["kind"], **{name: value for name, value in row.items() if not name.startswith("_")})
    op = whole_shards(op)
    limits = [float(entry.get("max_bytes") or 0), float(settings.max_bytes)]
    cost = op.cost
    if float(cost.flops) > float(entry.get("max_flops") or "inf"):
        return
    if float(cost.bytes) > min((limit for limit in limits if limit), default=float("inf")):
        return
    for name in _backends(op, backend, settings):
        yield Case.from_dict({**op.to_dict(), "backend": name, "cache": cache})


def whole_shards(op: Op) -> Op:
    """A collective with its size cut to whole shards of 16 bytes for each rank, as nccl-tests rounds it."""
    if op.kind not in ("all_gather", "reduce_scatter", "all_to_all"):
        return op
    shard = 16 * op.ranks
    return op.replace(size_bytes=max(op.size_bytes // shard, 1) * shard)


def _backends(op: Op, name: str, settings: Settings) -> list[str]:
    """The backend names that ``usual``, ``all`` or a plain name stands for."""
    if name not in (USUAL, ALL):
        return [name]
    if KINDS[op.kind].collective:
        return ["nccl" if settings.device == "cuda" else "gloo"]
    from .cases import backends

    names = backends(op, settings.device) or ["torch"]
    if name == ALL:
        return names
    at_hand = [name for name in names if not package_of(name)]
    return [min(at_hand or names, key=lambda backend: is_eager(op.kind, backend))]


def _explicit(values: Any, spec: Mapping[str, Any], settings: Settings) -> Iterator[Case]:
    """Cases from op dicts; those without cache get the campaign's."""
    caches = spec.get("cache", "warm")
    for item in values or ():
        fields = dict(item)
        backend = fields.pop("backend", USUAL)
        chosen = fields.pop("cache", caches)
        for cache in [chosen] if isinstance(chosen, str) else chosen:
            case = Case.from_dict({**fields, "cache": cache})
            yield from (dataclasses.replace(case, backend=b) for b in _backends(case.op, backend, settings))
