"""One replica as everybody has it: served, searched, validated and on the page.

Its tables and KV memory come from its own steps (:mod:`.steps`), its limits and CUDA graphs from its engine, its host
from known runs (:mod:`.host`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from ..question.canonical import RequestError
from ..question.kv_tiers import PCIE_SHARE
from ..question.serving import SWAP_GBPS, IterationLaw
from ..report.account import mixture_notes
from .adapter_costs import AdapterCosts
from .engines import ServingEngine, UsualLimits
from .expert_drift import ExpertCosts
from .figures import StepFigures
from .host import FirstToken, HostTime, layers_and_experts
from .images import EncoderCosts
from .iteration import IterationTables, linear_tables
from .kv import KvBudget
from .steps import ReplicaSteps
from .surrogate import Surrogate

LONGEST = 1 << 30
USUAL_LAYERS = 32  # of a model that nobody described


@dataclass(frozen=True)
class ServedReplica:
    """What a replica is to the event loop: how long its iterations take, its KV memory, its host, its pipeline."""

    tables: IterationTables
    kv: KvBudget
    host: HostTime = field(default_factory=HostTime)
    layers: int = 0  # of its model, 0 where nobody knows,
    experts: int = 0  # and those of them with experts
    stages: int = 1
    devices: int = 1
    max_model_len: int = LONGEST
    shortened: str = ""  # what to say where that is less than its model's
    limits: UsualLimits = field(default_factory=UsualLimits)
    graphs: tuple[int, ...] = ()
    figures: StepFigures | None = None
    price_per_hour: float = 0.0  # of a device
    host_gbps: float = SWAP_GBPS  # GB/s between a device and host memory
    notes: tuple[str, ...] = ()  # what was chosen of its model's formats
    sources: Mapping[str, float] = field(default_factory=dict)  # share of kernel time by whose measurements
    adapters: AdapterCosts | None = None  # what one takes, where requests ask for any
    moving_experts: ExpertCosts | None = None  # what sharing them out takes, where their load drifts
    encoder: EncoderCosts | None = None  # of images, where requests have any
    run: Mapping[str, str] = field(default_factory=dict)  # its engine, system and model, as served runs name them
    weights_gb: float = 0.0  # of all its devices together; 0 where nobody asked
    link: tuple[float, float] | None = None  # of one that decodes: GB/s and microseconds of the way of a cache to it

    @property
    def layer_share(self) -> float:
        """The share of its model that one layer is."""
        return 1 / (self.layers or USUAL_LAYERS)

    def first_token_us(self, clients: float, prompt: float) -> float:
        """Microseconds that its host adds to a first token, of a prompt of so many tokens, where so many clients send
        to it at a time."""
        return self.host.first_token_us(FirstToken(clients, prompt, self.layers, self.experts))


def replica(
    steps: ReplicaSteps, engine: ServingEngine, host: HostTime, surrogate: Surrogate, kv: KvBudget, ranks: int = 1
) -> ServedReplica:
    """The replica of ``steps``, of so many ``ranks`` of attention data parallelism."""
    parallel = steps.plan.parallel
    layers, experts = layers_and_experts(steps.config)
    return ServedReplica(
        surrogate.tables._replace(issue_us=float(steps.plan.prompt_issue_us)),
        kv,
        host,
        layers,
        experts,
        stages=parallel.pp,
        devices=parallel.tp * parallel.pp * ranks,
        limits=engine.limits_on(steps.device.name, steps.device.memory_gib),
        notes=(*steps.plan.notes, *mixture_notes(surrogate.sources)),
        sources=surrogate.sources,
        figures=surrogate.figures,
        price_per_hour=steps.plan.cluster.price_per_device_hour,
        host_gbps=PCIE_SHARE * steps.device.pcie_gbps or SWAP_GBPS,
    )


def by_hand(law: IterationLaw, blocks: int | None, block_tokens: int | None, bytes_per_token: float) -> ServedReplica:
    """The replica of a law that a user gives. RequestError without KV blocks."""
    if blocks is None:
        raise RequestError("iteration times given by hand need kv.blocks, the KV memory of a replica")
    return ServedReplica(linear_tables(**asdict(law)), KvBudget(blocks, block_tokens or 16, bytes_per_token))
