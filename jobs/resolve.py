"""From configuration to objects: devices, engines, stores. The door between Hydra and the rest of opcast."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..datasets.clusters import Cluster, one_device
from ..datasets.devices import Device, DeviceError, known_devices, load_device, overridden
from ..datasets.store import Store
from ..models.power import Limits, PowerError
from ..simulator.engines import FusedEngine, build_engine
from ..simulator.engines.backends import check_backend
from ..simulator.engines.network import NetworkEngine
from ..simulator.network.build import check_settings, own_links
from ..simulator.network.faults import Fault
from ..simulator.network.topology import Topology
from ..simulator.question.plan import Parallel, Plan, PlanError, Stack, load_stack, stack_from_dict
from .show import BadInputError

PACKAGE = Path(__file__).resolve().parent.parent
SHIPPED_STORE = PACKAGE / "datasets" / "measured"
SHIPPED_PREDICTORS = PACKAGE / "models" / "shipped"
FIDELITIES = ("auto", "analytical", "flow", "packet")
LINK_FAULTS = ("faults", "fault_draw", "faults_study")


def stores(config: Mapping[str, Any]) -> list[Path]:
    """The user's store, then the measurements that ship with opcast."""
    return [Path(config["store"]).expanduser(), SHIPPED_STORE]


def registries(config: Mapping[str, Any]) -> list[Path]:
    """The user's predictors, then those that ship with opcast."""
    return [Path(config["predictors"]).expanduser(), SHIPPED_PREDICTORS]


def graphs(config: Mapping[str, Any]) -> Path:
    """The folder of traced graphs, made where it is missing. BadInputError for what can be none."""
    given = config["graphs"]
    if not isinstance(given, str) or not given:
        raise BadInputError(f"graphs={given!r} must be a folder, such as graphs=~/.opcast/graphs")
    folder = Path(given).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInputError(f"graphs={given} can be no folder ({error.strerror}); name another") from None
    return folder


def device(config: Mapping[str, Any]) -> Device:
    """The chosen device with its overrides; a measured one comes from the store.

    Raises DeviceError for an unknown device and BadInputError for this machine when nobody measured it yet.
    """
    chosen = dict(config["device"])
    if config.get("cluster") and chosen.get("id") == "cpu":
        chosen["id"] = config["cluster"]["device"]
    if len(chosen) > 1 and "name" in chosen:
        shipped = str(chosen.get("id")) in known_devices()
        return overridden(load_device(str(chosen["id"])), chosen) if shipped else Device.from_dict(chosen)
    device_id = str(chosen.pop("id"))
    local = device_id == "cpu"
    if local:
        from ..harness.environment import cpu_device_id

        device_id = cpu_device_id()
    for path in stores(config):
        found = Store(path).device(device_id) if path.is_dir() else None
        if found is not None:
            return overridden(found, chosen) if chosen else found
    if local:
        raise BadInputError(
            f"this machine ({device_id}) is not measured yet in {config['store']}; "
            "run `opcast quickstart`, or name another device=… (`opcast list devices`)"
        )
    try:
        known = load_device(device_id)
    except DeviceError as error:
        raise DeviceError(f"{error} or measure it with `opcast profile`") from None
    return overridden(known, chosen)


def engine(config: Mapping[str, Any], target: Device, planned: Plan | None = None) -> FusedEngine:
    """The engines of ``engine.order`` over the stores and predictors of this configuration.

    With ``network=flow`` or ``packet`` the flows of ``planned`` groups come first, with ``faults`` and those of
    ``fault_draw``. TopologyError for a link that is not there, or a fabric that falls apart.
    """
    joined = cluster(config)
    backend = check_backend(config.get("backend"), target, stores(config), registries(config))
    order: Any = (config["engine"] or {}).get("order")
    found = build_engine(target, stores(config), registries(config), order, backend, joined)
    fidelity = network_fidelity(config)
    if joined is None or fidelity == "analytical":
        return found
    from ..simulator.engines.flow import FlowEngine

    formula = NetworkEngine(target, joined, [Store(path) for path in stores(config) if path.is_dir()])
    flows = FlowEngine(formula, found, planned, fidelity=fidelity)
    if config.get("faults_study"):
        study_settings(config)  # what it cannot be shows before the step is simulated
    faults = link_faults(config, flows.base.topology)
    if faults:
        flows = flows.with_faults(faults)
        flows.topology  # noqa: B018  what is not there, or falls apart, shows here
    return FusedEngine([flows, *found.engines])


def link_faults(config: Mapping[str, Any], topology: Topology) -> list[Fault]:
    """The ``faults`` of a configuration and those that its ``fault_draw`` finds on a fabric. TopologyError if bad."""
    from ..simulator.network.faults import draw, drawing, from_dicts

    faults = from_dicts(config.get("faults") or [])
    if config.get("fault_draw"):
        if not isinstance(config["fault_draw"], Mapping):
            raise BadInputError(f"fault_draw={config['fault_draw']!r} must be a mapping, such as {{count: 2, seed: 0}}")
        asked = drawing(config["fault_draw"], "fault_draw")
        faults += draw(topology, asked.at_once, asked.like, asked.seed, asked.kinds)
    return faults


def study_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The ``faults_study`` of a configuration; TopologyError for what it cannot be."""
    from ..simulator.network.faults import drawing

    settings = config.get("faults_study") or {}
    if not isinstance(settings, Mapping):
        raise BadInputError(f"faults_study={settings!r} must be a mapping, such as {{samples: 64, count: 1}}")
    drawing(settings, "faults_study")
    return settings


def network_fidelity(config: Mapping[str, Any]) -> str:
    """``network=…``; ``auto`` is analytical, or flow where links have faults or figures of their own.

    BadInputError for anything else.
    """
    asked = [name for name in LINK_FAULTS if config.get(name)]
    chosen = config.get("network", "auto")
    if chosen not in FIDELITIES:
        raise BadInputError(f"network={chosen!r} is not one of {', '.join(FIDELITIES)}")
    if chosen == "analytical" and asked:
        raise BadInputError(f"{asked[0]} needs links that are simulated: take network=flow")
    if chosen == "auto":
        given = (config.get("cluster") or {}).get("topology")
        return "flow" if asked or (isinstance(given, Mapping) and own_links(given)) else "analytical"
    return str(chosen)


def cluster(config: Mapping[str, Any]) -> Cluster | None:
    """The chosen cluster, or None for one device. ClusterError for an impossible figure."""
    chosen = config.get("cluster")
    if not chosen:
        return None
    price = config.get("price_per_gpu_hour")
    made = Cluster.from_dict(chosen if price is None else {**chosen, "price_per_device_hour": price})
    check_settings(made.topology)
    return made


def plan(config: Mapping[str, Any], target: Device, work_kind: str, dtype: str) -> Plan:
    """How the model is spread over the cluster, or runs on one device. PlanError for degrees that need a cluster."""
    parallel = dict(config["parallel"])
    joined = cluster(config)
    if joined is None:
        wanted = needing_cluster(config)
        if wanted:
            raise PlanError(f"{' '.join(wanted)} needs a cluster: name one with cluster=… (`opcast list clusters`)")
    quantization = str(config["precision"].get("quantization") or "")
    where = joined or single(target, config.get("price_per_gpu_hour"))
    return Plan(
        parallel=Parallel(**parallel),
        cluster=where,
        stack=stack(config, "alone" if joined is None else work_kind),
        recompute=str(config["workload"].get("recompute", "none")),
        offload=config["offload"],
        precision=dtype,
        quantization=quantization,
        passes=config["passes"],
        options=config["options"],
        slow_devices=stragglers(config, where),
    )


def single(target: Device, price_per_device_hour: Any = None) -> Cluster:
    """The cluster that one device is."""
    alone = one_device(target)
    return alone if price_per_device_hour is None else replace(alone, price_per_device_hour=price_per_device_hour)


def stragglers(config: Mapping[str, Any], joined: Cluster) -> dict[int, float]:
    """How many times longer compute takes, by device; PlanError for a device that is not there."""
    if not config.get("stragglers"):
        return {}
    from ..simulator.question.stragglers import slow_devices

    return slow_devices(config["stragglers"], joined)


def needing_cluster(config: Mapping[str, Any]) -> list[str]:
    """The settings of a configuration that mean nothing on a single device, as they were given."""
    usual = Parallel()
    given = {f"parallel.{name}": value for name, value in config["parallel"].items() if name not in ("dp", "stages")}
    wanted = [f"{name}={value}" for name, value in given.items() if value != getattr(usual, name.partition(".")[2])]
    wanted += [f"parallel.dp={config['parallel']['dp']}"] if config["parallel"]["dp"] not in (0, 1) else []
    wanted += [f"parallel.stages={config['parallel']['stages']}"] if config["parallel"]["stages"] else []
    wanted += [f"{name}={config[name]}" for name in LINK_FAULTS if config.get(name)]
    return wanted + ([f"network={config['network']}"] if config.get("network", "auto") not in FIDELITIES[:2] else [])


def stack(config: Mapping[str, Any], work_kind: str) -> Stack:
    """The chosen framework with its overrides.

    Without a choice a device alone runs PyTorch; on a cluster Megatron-LM trains and TensorRT-LLM serves.
    """
    chosen = config.get("stack") or {}
    if "id" in chosen:
        return stack_from_dict(chosen)
    usual = load_stack({"alone": "torch", "train": "megatron"}.get(work_kind, "trtllm"))
    return stack_from_dict(dataclasses.asdict(usual) | chosen) if chosen else usual


def model(config: Mapping[str, Any]) -> str | dict[str, Any]:
    """The chosen model: a path, hub id or ``module:callable`` as given, or a shipped configuration with overrides."""
    from ..simulator.trace.models import shipped_config

    chosen = config["model"]
    if not isinstance(chosen.get("config"), Mapping):
        raise BadInputError(f"model.config={chosen.get('config')!r} must be settings, as model.config.hidden_size=1024")
    if "path" in chosen:
        usual = shipped_config(str(chosen["name"]))
        for name, value in chosen["config"].items():
            if name not in usual or usual[name] != value:
                raise BadInputError(
                    f"model.config.{name}={value} is for models that opcast ships: change it in model={chosen['path']}"
                )
        return str(chosen["path"])
    return {"name": chosen["name"], **chosen["config"]}


def usual_precision(target: Device) -> str:
    """fp32 on a CPU; elsewhere bf16, or fp16 where the device has no bf16."""
    if target.synchronous:
        return "fp32"
    return "bf16" if target.supports("bf16") else "fp16"


def limits(config: Mapping[str, Any]) -> Limits:
    """``power_cap_w`` and ``sm_clock_mhz`` of a configuration. PowerError for what is no positive number."""
    made = {}
    for field, name in (("cap_w", "power_cap_w"), ("clock_mhz", "sm_clock_mhz")):
        value = config.get(name)
        try:
            made[field] = None if value is None else float(value)
        except (TypeError, ValueError):
            raise PowerError(f"{name}={value!r} must be a positive number") from None
    return Limits(**made)
