"""What serving engines are: figures of memory, CUDA graphs, limits, host and arguments, one YAML each.

``conf/serving_engine/NAME.yaml`` says where each figure is from: ``sources``, by its name (``kv.spare_gib``) or that of
the part that it is in (``kv``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path

from ...datasets.figure_sources import FigureSource
from ...datasets.loading import check_fields, choice, load, nearest, number, whole
from ...datasets.reading import read_yaml

DIRECTORY = Path(__file__).resolve().parents[2] / "conf" / "serving_engine"
KV_RULES = ("of_total", "static", "of_free")
DATA_PARALLEL = ("ranks", "replicas", "experts")


class ServingEngineError(ValueError):
    """An engine, or an argument of one, that does not exist. The message names it and the way out."""


@dataclass(frozen=True)
class KvRule:
    """How an engine sizes its KV memory (:mod:`.kv`). ``window_share``: of the tokens that ``stack.windows`` says, the
    part for which layers with a window have blocks, by type of model; 1 where it does not say."""

    rule: str
    fraction: float
    block_tokens: int
    spare_gib: float = 0.0
    window_share: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        choice(ServingEngineError, "kv.rule", self.rule, KV_RULES)
        whole(ServingEngineError, "kv.block_tokens", self.block_tokens, 1)
        number(ServingEngineError, "kv.spare_gib", self.spare_gib)
        for name, share in self.window_share.items():
            number(ServingEngineError, f"kv.window_share.{name}", share)
        if not 0 <= self.fraction <= 1:
            raise ServingEngineError(f"kv.fraction={self.fraction!r} must be from 0 to 1")

    def pass_tokens(self, max_tokens: int, chunk: int) -> int:
        """Tokens of the largest pass, beside which keys and values must fit: SGLang's is a chunk of prompts."""
        return min(max_tokens, chunk) if self.rule == "static" else max_tokens


@dataclass(frozen=True)
class GraphSizes:
    """Batch sizes of CUDA graphs: ``few``, then (first, last, step) of each of ``steps``, then ``more``."""

    few: tuple[int, ...] = ()
    steps: tuple[tuple[int, int, int], ...] = ()
    more: tuple[int, ...] = ()
    most: int = 512
    most_below_tp4: int = 0

    def sizes(self, tp: int, max_seqs: int) -> tuple[int, ...]:
        """The sizes that are captured, ascending."""
        most = self.most_below_tp4 if tp < 4 and self.most_below_tp4 else self.most
        steps = [size for first, last, step in self.steps for size in range(first, last + 1, step)]
        return tuple(size for size in (*self.few, *steps, *self.more) if size <= min(most, 2 * max_seqs))


@dataclass(frozen=True)
class UsualLimits:
    """Limits of an engine's scheduler on devices of ``from_gib`` and more, but for those ``not_on`` names; None: those
    of its policy."""

    from_gib: float = 0.0
    not_on: str = ""
    max_tokens: int | None = None
    max_seqs: int | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        number(ServingEngineError, "limits.from_gib", self.from_gib)
        for name in ("max_tokens", "max_seqs", "chunk"):
            if getattr(self, name) is not None:
                whole(ServingEngineError, f"limits.{name}", getattr(self, name), 1)


@dataclass(frozen=True)
class SerialHost:
    """What the host adds to an iteration, and for each sequence in it, where an engine schedules no step ahead: in
    versions ``before`` one (empty: all)."""

    step_us: float = 0.0
    seq_us: float = 0.0
    before: str = ""

    def __post_init__(self) -> None:
        check_fields(self, ServingEngineError, "host.serial")


@dataclass(frozen=True)
class HostRule:
    """From which version on an engine schedules a step ahead; what a first token waits for is fitted (:mod:`.host`).

    ``serial`` is what its host adds where it does not, oldest versions first. ``stream_us`` is what its server to
    clients takes for each token that it streams, in a process of its own.
    """

    overlapped_from: str = ""
    stream_us: float = 0.0
    serial: Sequence[SerialHost] = ()

    def __post_init__(self) -> None:
        number(ServingEngineError, "host.stream_us", self.stream_us)


@dataclass(frozen=True)
class TooLong:
    """What an engine does about sequences longer than its KV memory: it ``stops`` at its start, or serves shorter ones.
    ``argument`` says how long they may be; with ``beyond_model`` it takes those that are longer than its model's."""

    argument: str = ""
    stops: bool = False
    beyond_model: str = ""


@dataclass(frozen=True)
class ServingEngine:
    """An engine. ``arguments`` says what each of its own is here (:mod:`.engine_args`); those ``without_effect`` change
    no time. ``not_simulated`` are all others that its ``version`` has on the command line. ``data_parallel``: ranks
    in lockstep, replicas of their own, or ``experts``: ranks where experts are shared, else replicas. With
    ``prefix_caching`` it caches prefixes unless told not to. On a device without units of a format in ``unpacks`` it
    keeps such weights packed and multiplies in 16 bits.
    """

    id: str
    stack: str
    kv: KvRule
    graphs: GraphSizes = field(default_factory=GraphSizes)
    limits: Sequence[UsualLimits] = ()
    host: HostRule = field(default_factory=HostRule)
    too_long: TooLong = field(default_factory=TooLong)
    arguments: Mapping[str, str] = field(default_factory=dict)
    version: str = ""
    without_effect: Sequence[str] = ()
    not_simulated: Sequence[str] = ()
    data_parallel: str = "ranks"
    prefix_caching: bool = True
    unpacks: Sequence[str] = ()
    sources: Mapping[str, FigureSource] = field(default_factory=dict)

    def __post_init__(self) -> None:
        choice(ServingEngineError, "data_parallel", self.data_parallel, DATA_PARALLEL)

    def limits_on(self, device: str, memory_gib: float) -> UsualLimits:
        """The limits that it has on a device unless it is told others."""
        fitting = (
            limit
            for limit in self.limits
            if memory_gib >= limit.from_gib and not (limit.not_on and limit.not_on in device)
        )
        return next(fitting, UsualLimits())


def engine_figures(engine: ServingEngine) -> Iterator[tuple[str, str, FigureSource]]:
    """(name, value in words, source) of every figure of an engine. KeyError for one that no source is named of."""
    for group in ("kv", "graphs", "host"):
        for name, value in asdict(getattr(engine, group)).items():
            full = f"{group}.{name}"
            yield full, str(value), engine.sources[full if full in engine.sources else group]
    for limit in engine.limits:
        for name in ("max_tokens", "max_seqs", "chunk"):
            if (value := getattr(limit, name)) is not None:
                yield f"limits.{name} from {limit.from_gib:g} GiB", str(value), engine.sources["limits"]


@lru_cache
def load_serving_engine(name: str) -> ServingEngine:
    """A shipped engine by name. ServingEngineError names the known ones."""
    names = known_serving_engines()
    if name not in names:
        raise ServingEngineError(f"engine={name} does not exist; {nearest(name, names)}")
    values = read_yaml(DIRECTORY / f"{name}.yaml", ServingEngineError)
    return load(ServingEngine, values, ServingEngineError, f"engine={name}")


def known_serving_engines() -> list[str]:
    """The shipped engines, by name."""
    return sorted(path.stem for path in DIRECTORY.glob("*.yaml"))
