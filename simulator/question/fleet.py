"""How a fleet of replicas is run: how requests are weighed for it, how it grows and shrinks, how replicas start, fail
and come back."""

from __future__ import annotations

from dataclasses import dataclass

from ...datasets.loading import check_fields, choice
from .canonical import RequestError
from .declaration import setting

SCALERS = ("utilisation", "queue", "sla")
METRICS = ("requests", "kv", "busy")
LOST = ("retry", "migrate", "fail")


@dataclass(frozen=True)
class ScorerWeights:
    """Weights of the scores by which ``router=scorers`` sends requests. Those that the Inference Extension's chart has
    (``config/charts/inferencepool/templates/epp-config.yaml``), unless given."""

    queue: float = setting(2.0, "of a queue shorter than others (queue-scorer)")
    kv: float = setting(2.0, "of free KV memory (kv-cache-utilization-scorer)")
    prefix: float = setting(3.0, "of the share of the prompt that is cached (prefix-cache-scorer)")

    def __post_init__(self) -> None:
        check_fields(self, RequestError, "scorers")
        if not any(vars(self).values()):
            raise RequestError("scorers: every weight is 0, so that nothing is weighed: give one of them a weight")


@dataclass(frozen=True)
class ColdStart:
    """How long a replica that starts takes until it serves."""

    seconds: float | None = setting(None, "in all; null: weights ÷ store_gbps, then engine_s")
    store_gbps: float | None = setting(None, "GB/s at which a replica reads its weights", positive=True)
    weights_gb: float | None = setting(None, "GB of weights of a replica; null: as the model has them")
    # Judged: compiling alone took 39 s in a start that others measured (a model of 35 billion parameters, NVFP4, vLLM).
    engine_s: float = setting(60.0, "of the engine beside its weights: compiling, profiling, CUDA graphs")

    def __post_init__(self) -> None:
        check_fields(self, RequestError, "cold_start")
        if self.seconds is not None and self.store_gbps is not None:
            raise RequestError("cold_start.seconds and cold_start.store_gbps say the same: leave out one of them")

    @property
    def known(self) -> bool:
        """Whether it says how long that is."""
        return self.seconds is not None or self.store_gbps is not None


@dataclass(frozen=True)
class Autoscale:
    """Who says how many replicas serve. ``policy`` null: nobody, there are as many as ``replicas`` all the time."""

    policy: str | None = setting(
        None, "utilisation (Kubernetes' HPA) | queue (KEDA) | sla (NVIDIA Dynamo's planner) | module:function"
    )
    metric: str = setting(
        "requests", "of utilisation, of a replica: requests (not ended) | kv (share) | busy (share)", choices=METRICS
    )
    target: float | None = setting(None, "of the metric; of queue: requests that wait for each replica", positive=True)
    min_replicas: int = setting(1, "at least", least=1)
    max_replicas: int | None = setting(None, "at most; null: replicas, which is also how many there are at first")
    interval_s: float | None = setting(None, "between two looks; null: 15, of sla 180", positive=True)
    tolerance: float = setting(0.1, "of the metric over its target, within which nothing changes")
    up_window_s: float = setting(0.0, "of looks of which the least counts, before there are more")
    down_window_s: float = setting(300.0, "of looks of which the most counts, before there are fewer")

    def __post_init__(self) -> None:
        if self.policy is not None and ":" not in self.policy:
            choice(RequestError, "autoscale.policy", self.policy, SCALERS)
        check_fields(self, RequestError, "autoscale")
        if self.max_replicas is not None and self.max_replicas < self.min_replicas:
            least = f"autoscale.min_replicas={self.min_replicas}"
            raise RequestError(f"autoscale.max_replicas={self.max_replicas} must be at least {least}")
        if self.policy in ("utilisation", "queue") and self.target is None:
            what = f"of {self.metric}" if self.policy == "utilisation" else "requests that wait for each replica"
            raise RequestError(f"autoscale.policy={self.policy} needs a target, {what}: give autoscale.target")

    @property
    def seconds(self) -> float:
        """Between two looks: of HPA (horizontal-pod-autoscaler-sync-period), of Dynamo's planner
        (throughput_adjustment_interval of ``config/defaults.py``)."""
        return self.interval_s or (180.0 if self.policy == "sla" else 15.0)


@dataclass(frozen=True)
class ReplicaFailures:
    """How often replicas fail and how long they are away, at random by a seed. Their KV memory is lost."""

    mtbf_h: float | None = setting(
        None, "mean hours between failures of a GPU: a replica of n fails n times as often; null: none fails"
    )
    repair_s: float = setting(0.0, "until a replica that failed starts again (cold_start is beside it)")
    requests: str = setting(
        "retry",
        "what it had: retry (all anew) | migrate (answers go on behind the tokens that clients have) | fail",
        choices=LOST,
    )
    seed: int = setting(0, "of the times of failures")

    def __post_init__(self) -> None:
        check_fields(self, RequestError, "failures")
        if self.mtbf_h == 0:
            raise RequestError("failures.mtbf_h=0 must be more than 0: leave it out, and none fails")
