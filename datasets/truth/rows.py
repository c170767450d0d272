"""What a row of a table says, in opcast's words and units, before anything simulates it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..ops import Op


class TruthError(ValueError):
    """A file that is no table of results, or a row that cannot be read. The message says which and why."""


@dataclass(frozen=True)
class UnsupportedRow:
    """A row that is not simulated, and why. ``by_outcome``: because of its measured result."""

    id: str
    why: str
    source: str = ""
    by_outcome: bool = False


@dataclass(frozen=True)
class FailedRow:
    """A row that an error of opcast's own kept from being simulated: a fault to report, not a property of the row."""

    id: str
    error: str
    source: str = ""

    @classmethod
    def by(cls, row_id: str, error: Exception, source: str = "") -> FailedRow:
        """The row and what was raised, in one line."""
        return cls(row_id, " ".join(f"{type(error).__name__}: {error}".split()), source)


@dataclass(frozen=True)
class Hardware:
    """The machine of a run: ids of ``conf/device`` and ``conf/cluster``, and figures in which it differs from them.

    ``devices`` are spread over nodes as evenly as they come; ``cluster`` is empty where only an op was run. Two
    machines are the same where all of it is; their hash leaves figures out.
    """

    gpu: str
    device: str
    cluster: str
    devices: int
    device_figures: Mapping[str, Any] = field(default_factory=dict, hash=False)
    cluster_figures: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class PublishedLayout:
    """Degrees of parallelism; ``dp`` 0 means whatever the devices leave, ``shard`` 0 all data ranks.

    ``stages`` are the layers of each pipeline stage where a framework does not share them evenly.
    """

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    dp: int = 0
    zero_stage: int = 0
    shard: int = 0
    sequence_parallel: bool = False
    stages: tuple[int, ...] = ()

    def __str__(self) -> str:
        degrees = {"tp": self.tp, "pp": self.pp, "vpp": self.vpp, "cp": self.cp, "ep": self.ep, "dp": self.dp}
        text = " ".join(f"{name}{value}" for name, value in degrees.items() if value > 1)
        return (text or "one") + (f" zero{self.zero_stage}" if self.zero_stage else "")


@dataclass(frozen=True, kw_only=True)
class Row:
    """What every row has. ``measured`` and ``peer`` (what another tool predicted) are by quantity.

    Units: ``step_time`` s, ``peak_memory`` GiB, ``fits`` true or false, ``ttft``, ``tpot``, ``e2e`` ms, ``throughput``
    tokens/s of all devices, ``latency`` ms, ``activation_share`` % of what the same run keeps for its backward pass
    without sequence parallelism and recomputation. ``tags`` are what rows are grouped by, ``source`` is who published
    the row (:mod:`.halves`).
    """

    id: str
    hardware: Hardware
    measured: Mapping[str, float]
    peer: Mapping[str, float] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class ModelRow(Row):
    """A run of a model. ``config`` is its transformers configuration; ``framework`` names a file of ``conf/stack``.

    ``precision`` is the dtype of weights and activations, ``quantization`` the format of matrix products where it is
    another (empty: the same). ``memory`` says what the published peak counts: ``allocated`` by the framework's
    allocator, ``reserved`` by it, or the whole ``device``.
    """

    model: str
    config: Mapping[str, Any]
    framework: str
    layout: PublishedLayout
    precision: str
    quantization: str = ""
    memory: str = "allocated"
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TrainingRow(ModelRow):
    """A training step. Batches in sequences; ``recompute`` is a policy of :mod:`opcast.simulator.passes.recompute`.

    ``lora_rank`` is that of adapters that are trained in place of the weights (0: the weights are), ``lora_modules``
    a pattern of what they stand beside (empty: the usual), ``lora_dropout`` the share of their input that they drop.
    ``mtp_layers`` learn tokens further on beside the model.
    """

    seq_len: int
    global_batch: int
    micro_batch: int
    recompute: str = "none"
    lora_rank: int = 0
    lora_modules: str = ""
    lora_dropout: float = 0.0
    mtp_layers: int = 0

    @property
    def configuration(self) -> tuple[Any, ...]:
        """What two runs share that are repeats of each other."""
        return (
            *(self.model, self.hardware.gpu, self.hardware.devices, self.precision, self.quantization, self.framework),
            *(
                self.layout,
                self.seq_len,
                self.global_batch,
                self.micro_batch,
                self.recompute,
                self.lora_rank,
                self.lora_modules,
                self.lora_dropout,
                self.mtp_layers,
            ),
            tuple(sorted((key, str(value)) for key, value in self.options.items())),
        )


@dataclass(frozen=True, kw_only=True)
class InferenceRow(ModelRow):
    """A static batch: ``batch`` prompts of ``input_len`` tokens, ``output_len`` new ones each (1: only the prompt)."""

    batch: int
    input_len: int
    output_len: int
    micro_batches: int = 1

    @property
    def configuration(self) -> tuple[Any, ...]:
        """What two runs share that are repeats of each other."""
        return (
            *(self.model, self.hardware.gpu, self.hardware.devices, self.precision, self.quantization, self.framework),
            *(self.layout, self.batch, self.input_len, self.output_len, *sorted(self.options.items())),
        )


@dataclass(frozen=True)
class DecodeWorkers:
    """``workers`` of this layout that only decode, beside ``prefill`` workers of a row's own that only prefill."""

    prefill: int
    workers: int
    layout: PublishedLayout
    hardware: Hardware


@dataclass(frozen=True, kw_only=True)
class ServingRow(ModelRow):
    """A served run: ``concurrency`` requests at a time, all from the start, ten times as many in all.

    Lengths are nominal, drawn alike from ``shortest`` of them up to all. ``version`` is the engine's; attention-data
    ranks (``dp`` of the layout) share the requests. ``serving`` is how its engine was started: ``max_tokens`` of an
    iteration, ``chunk``, ``kv_fraction``, and so on. ``ttft`` and ``tpot`` are means. ``decoding`` is there where
    prompts and answers are computed by workers of their own; then layout and hardware are those of one that prefills.
    """

    concurrency: int
    input_len: int
    output_len: int
    shortest: float = 1.0
    version: str = ""
    serving: Mapping[str, float] = field(default_factory=dict)
    decoding: DecodeWorkers | None = None

    @property
    def configuration(self) -> tuple[Any, ...]:
        """What two runs share that are repeats of each other."""
        return (
            *(self.model, self.hardware.gpu, self.hardware.devices, self.quantization, self.framework, self.version),
            *(self.layout, self.concurrency, self.input_len, self.output_len, self.shortest, self.decoding),
            *sorted(self.serving.items()),
        )


@dataclass(frozen=True, kw_only=True)
class OperatorRow(Row):
    """One op or collective on one device (or group). ``clock_mhz`` is the clock it was locked at, None: free.

    ``empty_op_us`` is what the timer says of an op without work: 0 where it sees kernels alone, else what the host's
    call, the launch and the wait for the device take.
    """

    op: Op
    clock_mhz: float | None = None
    empty_op_us: float = 0.0

    @property
    def configuration(self) -> tuple[Any, ...]:
        """What two runs share that are repeats of each other."""
        return (self.op, self.hardware.gpu, self.clock_mhz, repr(sorted(self.hardware.cluster_figures.items())))


@dataclass(frozen=True, kw_only=True)
class NetworkRow(Row):
    """A collective over all ranks of one dimension: links of ``bandwidth_gbps`` (GB/s) and ``latency_us`` each."""

    collective: str
    size_bytes: int
    shape: str
    algorithm: str
    bandwidth_gbps: float
    latency_us: float


@dataclass(frozen=True)
class TruthTable:
    """The rows of a file that can be simulated, and those that cannot, with reasons; ``kind`` is what they hold.

    Reading the ``failed`` ones raised what no row should. ``by_outcome`` are rows that can be simulated, too, but are
    refused because of their measured result; each stands among the ``unsupported`` with its reason.
    """

    name: str
    kind: str
    rows: tuple[Row, ...]
    unsupported: tuple[UnsupportedRow, ...]
    failed: tuple[FailedRow, ...] = ()
    by_outcome: tuple[Row, ...] = ()

    @property
    def count(self) -> int:
        """All rows of the file."""
        return len(self.rows) + len(self.unsupported) + len(self.failed)
