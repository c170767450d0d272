"""Served runs: the replica of a row's model and layout, and its closed loop played through the engine's scheduler.

Rows of one model, layout, engine and device share their tables, which are kept on disk with the KV memory. Effects of
known steps (``calibration``) count only where a file is named: those that ship are of other releases of these engines,
and hosts are fitted without them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...datasets.truth import ServingRow
from ..engines import Engine
from ..question.calibration import NONE, OWN, USUAL
from ..question.plan import Parallel, Plan
from ..question.serving import IterationLaw, KvMemory, Scheduler, ServingRequest
from ..question.traffic import Lengths, RequestTraffic
from ..question.work import Work
from ..serving.engines import load_serving_engine
from ..serving.host import SERIAL, FittedHosts, fitted_hosts, host_name, layers_and_experts
from ..serving.kv import KvBudget
from ..serving.kv_memory import kv_budget
from ..serving.report import ServingReport
from ..serving.serve import serve
from ..serving.setup import HostShare, ServedReplica
from ..serving.surrogate import HeldOut, Surrogate, hashed, read, write
from ..serving.tabulate import Extent, tabulated
from ..step.build import engine_of
from ..step.state import State
from .cases import ValidationSettings, cluster_of, device_of, stack_of

EngineOf = Callable[[Any, Any], Engine]
MOST_SEQS, LONGEST = 512, 9472
MOST_TOKENS = (8192, 16384, 32768)
UNCHECKED = HeldOut(0, 0.0, 0.0, 0.0, 0.0)
PER_CLIENT = 10  # requests of each client, by InferenceX's benchmark
USUAL_TOKENS = {"vllm": 8192, "sglang": 16384, "trtllm": 8192}


@dataclass
class Replicas:
    """Tables and KV memory of every model, layout, engine and device asked about, each made once."""

    setting: ValidationSettings
    engine: EngineOf
    known: dict[str, ServedReplica] = field(default_factory=dict)

    def of(self, row: ServingRow) -> ServedReplica:
        """The replica of a row, without what its host adds. The errors of what it names and of simulating."""
        plan, extent = self.plan(row), extent_of(row)
        device = device_of(row.hardware, self.setting)
        rule = load_serving_engine(row.framework).kv
        fraction = row.serving.get("kv_fraction", rule.fraction)
        block = int(row.serving.get("block_tokens", rule.block_tokens))
        rule = replace(rule, fraction=fraction, block_tokens=block)
        about = {
            "model": dict(row.config),
            "plan": repr(plan),
            "device": repr(device),
            "extent": vars(extent),
            "rule": vars(rule),
            "stamp": list(self.setting.stamp),
        }
        key = hashed(about, plan.calibration)
        if key not in self.known:
            engine = self.engine(device, plan.cluster)

            def simulate(work: Work) -> State:
                from ..simulate import simulated

                return simulated(
                    row.config, replace(work, cache="static"), plan, device, engine, self.setting.cache_dir
                )

            self.known[key] = self._kept(
                key,
                lambda: tabulated(simulate, engine_of(plan.stack, engine), extent),
                lambda: kv_budget(simulate, device.memory_gib, rule, plan.parallel, extent.tokens),
                plan.parallel.pp,
                row.hardware.devices,
            )
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

    def _kept(
        self, key: str, tables: Callable[[], Any], kv: Callable[[], KvBudget], stages: int, devices: int
    ) -> ServedReplica:
        cache: Path | None = self.setting.cache_dir
        path = None if cache is None else cache.parent / "surrogates" / f"{key}.npz"
        found = read(path) if path is not None else None
        if found is None:
            found = Surrogate(tables(), UNCHECKED, kv=kv())
            if path is not None:
                write(path, found)
        assert found.kv is not None
        return ServedReplica(found.tables, found.kv, stages=stages, devices=devices)


def extent_of(row: ServingRow) -> Extent:
    """How far the tables of a row reach; alike for all rows of a layout, so that they share them."""
    wanted = row.serving.get("max_tokens", USUAL_TOKENS[row.framework])
    tokens = next((each for each in MOST_TOKENS if each >= wanted), MOST_TOKENS[-1])
    return Extent(sequences=MOST_SEQS, tokens=tokens, context=LONGEST)


def lengths(nominal: int, shortest: float) -> Lengths:
    """Lengths from ``shortest`` of the nominal one up to it."""
    if shortest == 1.0:
        return Lengths(mean=nominal)
    return Lengths("uniform", nominal, low=max(int(nominal * shortest), 1), high=nominal)


def asked(row: ServingRow, kv: KvBudget) -> ServingRequest:
    """The traffic of a row's clients and the limits of its engine."""
    dp = row.layout.dp
    given = row.serving
    vllm = row.framework == "vllm"
    return ServingRequest(
        law=IterationLaw(base_us=1.0),  # the replica has its own tables
        kv=KvMemory(kv.blocks, kv.block_tokens, kv.bytes_per_token),
        traffic=RequestTraffic(
            arrival="closed",
            concurrency=row.concurrency,
            requests=int(given.get("clients", PER_CLIENT)) * row.concurrency,
            input=lengths(row.input_len, row.shortest),
            output=lengths(row.output_len, row.shortest),
        ),
        scheduler=Scheduler(
            policy=row.framework,
            max_tokens=int(given.get("max_tokens", USUAL_TOKENS[row.framework])),
            max_seqs=max(row.concurrency // dp, 1) if vllm else None,
            chunk=int(given["chunk"]) if "chunk" in given else None,
            wait_iterations=int(given.get("wait_iterations", 0)),
            wait_share=given.get("wait_share", 0.0),
            async_scheduling=not host_of(row).endswith(SERIAL),
        ),
        attention_dp=dp,
        router="least_outstanding",
    )


def host_of(row: ServingRow) -> str:
    """What a row's engine is called among fitted hosts."""
    return host_name(row.framework, load_serving_engine(row.framework).host, row.version)


def played(row: ServingRow, replicas: Replicas, hosts: FittedHosts | None = None) -> ServingReport:
    """A row's clients served, under the hosts that ship unless others are given. The errors of simulating."""
    engine = load_serving_engine(row.framework)
    most = int(row.serving.get("graphs", 0))
    graphs = replace(engine.graphs, most=most, most_below_tp4=0) if most else engine.graphs
    host = (hosts or fitted_hosts()).of(host_of(row))
    first_us = host.first_token_us(
        row.concurrency, row.input_len * (1 + row.shortest) / 2, *layers_and_experts(row.config)
    )
    replica = replace(
        replicas.of(row),
        host=HostShare(host.step_us, host.seq_us, overlapped=False, ttft_us=first_us),
        graphs=graphs.sizes(row.layout.tp, row.concurrency),
    )
    return serve(asked(row, replica.kv), replica).report


def served(row: ServingRow, replicas: Replicas, hosts: FittedHosts | None = None) -> dict[str, float]:
    """TTFT and TPOT in ms, and output tokens a second of all GPUs. The errors of simulating."""
    report = played(row, replicas, hosts)
    times = {"ttft": report.ttft_ms.mean, "tpot": report.tpot_ms.mean}
    return times | {"throughput": throughput(row, times)}


def throughput(row: ServingRow, times: Mapping[str, float]) -> float:
    """Output tokens a second of a closed loop whose clients wait for nothing else (Little's law)."""
    tokens = row.output_len * (1 + row.shortest) / 2
    return row.concurrency * tokens / (times["ttft"] + (tokens - 1) * times["tpot"]) * 1e3
