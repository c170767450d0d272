"""Served runs: the replica of a row's model and layout, and its closed loop played through the engine's scheduler.

Rows of one model, layout, engine and device share their tables, which are kept on disk with the KV memory. Effects of
known steps (``calibration``) count only where a file is named: those that ship are of other releases of these engines,
and hosts are fitted without them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...datasets.clusters import load_cluster
from ...datasets.truth import DecodeWorkers, ServingRow
from ..engines import Engine
from ..question.calibration import NONE, OWN, USUAL
from ..question.plan import Parallel, Plan
from ..question.serving import DecodePool, IterationLaw, KvMemory, Scheduler, ServingRequest
from ..question.traffic import Lengths, RequestTraffic
from ..question.work import Work
from ..serving.engines import load_serving_engine
from ..serving.host import SERIAL, FittedHosts, HostTime, host_name, host_time
from ..serving.kv import KvBudget
from ..serving.link import between_two
from ..serving.policies import policy_of
from ..serving.replica import ServedReplica, replica
from ..serving.report import ServingReport
from ..serving.serve import serve
from ..serving.steps import ReplicaSteps, without_prompt_issue
from ..serving.surrogate import Surrogate, load_or_make, table_key
from ..serving.tabulate import Extent, tabulate
from ..step.build import LaidOut, engine_of
from ..step.state import State
from .cases import ValidationSettings, cluster_of, device_of, stack_of

EngineOf = Callable[[Any, Any], Engine]
MOST_SEQS, LONGEST = 512, 9472
MOST_TOKENS = (8192, 16384, 32768)
FEW_SEQS, MANY_SEQS = 32, 2048  # at a time, of workers that only prefill, and of those of which no limit is known
PER_CLIENT = 10  # requests of each client, by InferenceX's benchmark
DECODES = 1.0  # of ``serving``: what a worker does alone
USUAL_TOKENS = {"vllm": 8192, "sglang": 16384, "trtllm": 8192}


@dataclass
class Replicas:
    """Tables and KV memory of every model, layout, engine and device asked about, each made once."""

    setting: ValidationSettings
    engine: EngineOf
    known: dict[str, ServedReplica] = field(default_factory=dict)

    def of(self, row: ServingRow) -> ServedReplica:
        """The replica of a row, without a host. The errors of what it names and of simulating."""
        plan, extent, cache = self.plan(row), extent_of(row), self.setting.cache_dir
        device = device_of(row.hardware, self.setting)
        served_by = load_serving_engine(row.framework)
        fraction = row.serving.get("kv_fraction", served_by.kv.fraction)
        block = int(row.serving.get("block_tokens", served_by.kv.block_tokens))
        rule = replace(served_by.kv, fraction=fraction, block_tokens=block)
        usual_chunk = served_by.limits_on(device.name, device.memory_gib).chunk or extent.tokens
        most_tokens = rule.pass_tokens(extent.tokens, int(row.serving.get("chunk", usual_chunk)))
        about = {
            "model": dict(row.config),
            "plan": repr(plan),
            "device": repr(device),
            "extent": vars(extent),
            "rule": vars(rule),
            "most_tokens": most_tokens,
            "stamp": list(self.setting.stamp),
        }
        key = table_key(about, plan.calibration)
        if key not in self.known:
            engine = self.engine(device, plan.cluster)

            bare_plan = without_prompt_issue(plan)

            def simulate(works: Sequence[Work]) -> list[State]:
                from ..simulate import all_simulated

                steps = [replace(work, cache="static") for work in works]
                return all_simulated(row.config, steps, bare_plan, device, engine, cache)

            def lay_out(work: Work) -> LaidOut:
                from ..simulate import laid_out_or_else

                return laid_out_or_else(row.config, replace(work, cache="static"), bare_plan, device, cache)

            steps = ReplicaSteps(row.config, plan, device, simulate, lay_out, engine_of(plan.stack, engine))

            def make_tables() -> Surrogate:
                kv = steps.kv_budget(rule, most_tokens, sequences=extent.sequences)
                return Surrogate(tabulate(simulate, steps.kernels, extent), kv=kv)

            surrogate = load_or_make(None if cache is None else cache.parent / "surrogates" / f"{key}.npz", make_tables)
            assert surrogate.kv is not None
            self.known[key] = replica(steps, served_by, HostTime(), surrogate, surrogate.kv, row.layout.dp)
        return self.known[key]

    def plan(self, row: ServingRow) -> Plan:
        """How a row's model is laid out."""
        layout, setting = row.layout, self.setting
        return Plan(
            parallel=Parallel(tp=layout.tp, pp=layout.pp, dp=layout.dp, ep=layout.ep, etp=layout.etp),
            cluster=cluster_of(row.hardware, setting),
            stack=stack_of(row, setting),
            precision=row.precision,
            quantization=row.quantization,
            options=dict(row.options),
            calibration=NONE if setting.calibration in (USUAL, OWN) else setting.calibration,
        )

    def decoder(self, row: ServingRow, decoding: DecodeWorkers) -> ServedReplica:
        """A worker of a row that only decodes, with the way of caches to it, by NVLink where one node holds all."""
        settings = dict(row.serving) | {"only": DECODES}
        if "decode_kv_fraction" in settings:
            settings["kv_fraction"] = settings["decode_kv_fraction"]
        alone = replace(row, layout=decoding.layout, hardware=decoding.hardware, decoding=None, serving=settings)
        shipped = load_cluster(row.hardware.cluster)
        cluster = replace(shipped, nodes=max(shipped.nodes, 2))
        devices = decoding.prefill * row.hardware.devices + decoding.workers * decoding.hardware.devices
        engine = self.engine(device_of(row.hardware, self.setting), cluster)
        pair = between_two(cluster, engine, devices <= cluster.devices_per_node)
        layouts = row.layout, decoding.layout
        return replace(self.of(alone), link=(pair.gbps * min(layout.tp * layout.pp for layout in layouts), pair.us))


def extent_of(row: ServingRow) -> Extent:
    """How far the tables of a row reach; alike for all rows of a layout, so that they share them."""
    if row.serving.get("only") == DECODES:
        most = max(int(row.serving.get("decode_seqs", 0)), MOST_SEQS)
        return Extent(sequences=most, tokens=most, context=LONGEST)
    if row.decoding is not None:
        return Extent(sequences=FEW_SEQS, tokens=MOST_TOKENS[1], context=LONGEST)
    most_tokens = row.serving.get("max_tokens", USUAL_TOKENS[row.framework])
    tokens = next((size for size in MOST_TOKENS if size >= most_tokens), MOST_TOKENS[-1])
    return Extent(sequences=MOST_SEQS, tokens=tokens, context=LONGEST)


def lengths(nominal: int, shortest: float) -> Lengths:
    """Lengths from ``shortest`` of the nominal one up to it."""
    if shortest == 1.0:
        return Lengths(mean=nominal)
    return Lengths("uniform", low=max(int(nominal * shortest), 1), high=nominal)


def asked(row: ServingRow, kv: KvBudget) -> ServingRequest:
    """The traffic of a row's clients and the limits of its engine."""
    dp = row.layout.dp
    settings = row.serving
    return ServingRequest(
        law=IterationLaw(base_us=1.0),  # the replica has its own tables
        kv=KvMemory(kv.blocks, kv.block_tokens, kv.bytes_per_token),
        traffic=RequestTraffic(
            arrival="closed",
            concurrency=row.concurrency,
            requests=int(settings.get("clients", PER_CLIENT)) * row.concurrency,
            input=lengths(row.input_len, row.shortest),
            output=lengths(row.output_len, row.shortest),
        ),
        scheduler=Scheduler(
            policy=row.framework,
            max_tokens=int(settings.get("max_tokens", USUAL_TOKENS[row.framework])),
            max_seqs=seats_of(row),
            chunk=int(settings["chunk"]) if "chunk" in settings else None,
            wait_iterations=int(settings.get("wait_iterations", 0)),
            wait_share=settings.get("wait_share", 0.0),
            balance_iterations=int(settings.get("balance_iterations", 0)),
            gather_iterations=int(settings.get("gather_iterations", 0)),
            async_scheduling=not host_of(row).endswith(SERIAL),
            ignore_eos=policy_of(row.framework).counts_ends,  # benchmarks ask for it
        ),
        attention_dp=dp,
        router=router_of(row),
        decode_pool=DecodePool() if row.decoding is None else pool_of(row, row.decoding),
        replicas=1 if row.decoding is None else row.decoding.prefill,
    )


def router_of(row: ServingRow) -> str:
    """How requests come to ranks: TensorRT-LLM and SGLang know what ranks have, vLLM knew it a while ago."""
    if row.decoding is not None:
        return "least_outstanding" if row.decoding.layout.dp > 1 else "round_robin"
    return "vllm_dp" if row.framework == "vllm" else "least_outstanding"


def seats_of(row: ServingRow) -> int | None:
    """Requests that a rank of a row runs at a time: vLLM's recipes allow as many as there are clients, or
    (``shared_seats``) a rank's part of them."""
    if "max_seqs" in row.serving:
        return int(row.serving["max_seqs"])
    if "shared_seats" in row.serving:
        return -(-row.concurrency // row.layout.dp)
    if "without_seat" in row.serving:
        return max(row.concurrency - int(row.serving["without_seat"]), 1)
    return row.concurrency if row.framework == "vllm" else None


def pool_of(row: ServingRow, decoding: DecodeWorkers) -> DecodePool:
    """The workers of a row that only decode."""
    return DecodePool(
        replicas=decoding.workers,
        max_seqs=int(row.serving.get("decode_seqs", MANY_SEQS)),
        attention_dp=decoding.layout.dp,
    )


def host_of(row: ServingRow) -> str:
    """What a row's engine is called among fitted hosts."""
    return host_name(row.framework, load_serving_engine(row.framework).host, row.version)


def named_of(row: ServingRow) -> dict[str, str]:
    """What a row ran, as known runs name it (:data:`..serving.host.KNOWN_OF`)."""
    version = f"{row.framework} {row.version}"
    return {"engine": host_of(row), "version": version, "system": row.hardware.device, "model": row.model}


def played(row: ServingRow, replicas: Replicas, hosts: FittedHosts | None = None) -> ServingReport:
    """A row's clients served, under the hosts that ship unless others are given. The errors of simulating."""
    host = host_time(host_of(row), load_serving_engine(row.framework).host, hosts, row.version)
    replica = replace(replicas.of(row), host=host, graphs=graphs_of(row, row.layout.tp))
    if row.decoding is None:
        return serve(asked(row, replica.kv), replica).report
    decoder = replace(replicas.decoder(row, row.decoding), host=host, graphs=graphs_of(row, row.decoding.layout.tp))
    return serve(asked(row, replica.kv), replica, decoder).report


def graphs_of(row: ServingRow, tp: int) -> tuple[int, ...]:
    """Batch sizes of the CUDA graphs of a row's engine."""
    engine = load_serving_engine(row.framework)
    most = int(row.serving.get("graphs", 0))
    graphs = replace(engine.graphs, most=most, most_below_tp4=0) if most else engine.graphs
    return graphs.sizes(tp, row.concurrency)


def served(row: ServingRow, replicas: Replicas, hosts: FittedHosts | None = None) -> dict[str, float]:
    """TTFT and TPOT in ms, and output tokens a second of all GPUs. The errors of simulating."""
    report = played(row, replicas, hosts)
    times = {"ttft": report.ttft_ms.mean, "tpot": report.tpot_ms.mean if report.tpot_ms.count else 0.0}
    return times | {"throughput": throughput(row, times)}


def throughput(row: ServingRow, times: Mapping[str, float]) -> float:
    """Output tokens a second of a closed loop whose clients wait for nothing else (Little's law)."""
    tokens = row.output_len * (1 + row.shortest) / 2
    return row.concurrency * tokens / (times["ttft"] + (tokens - 1) * times["tpot"]) * 1e3
