"""From a verb's configuration to a request and the workbench that answers it: the door between Hydra and the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..datasets.clusters import Cluster, load_cluster
from ..datasets.devices import Device, known_devices, load_device, overridden
from ..datasets.ops import Op
from ..models.power import Limits
from ..simulator.engines import EngineError, FusedEngine
from ..simulator.question.calibration import OWN, own_calibration
from ..simulator.question.network import LINK_FAULTS, NetworkChoice, needs_cluster
from ..simulator.question.place import THIS_MACHINE
from ..simulator.question.sources import Sources
from ..simulator.workbench import SHIPPED_PREDICTORS, SHIPPED_STORE, Workbench, workbench
from .serving_engine import with_engine
from .serving_unread import check_arguments
from .show import BadInputError

if TYPE_CHECKING:
    from ..simulator.question.plan import Plan, Stack
    from ..simulator.question.predictions import PredictRequest
    from ..simulator.question.requests import CalibrateRequest, SimulateRequest, ValidateRequest
    from ..simulator.question.serving import ServingRequest
    from ..simulator.question.work import Work
    from ..simulator.search.request import SearchRequest
    from ..simulator.search.served.request import ServedSearchRequest

OWN_OF_POOL = ("device", "cluster", "parallel", "precision")
__all__ = ["LINK_FAULTS", "SHIPPED_PREDICTORS", "SHIPPED_STORE"]


def sources(config: Mapping[str, Any]) -> Sources:
    """Where answers come from. EngineError for an order of engines that cannot be."""
    order = (config["engine"] or {}).get("order") if "engine" in config else Sources.order
    if not isinstance(order, (list, tuple)):
        raise EngineError(f"engine.order={order!r} must be a list of engines, such as [{','.join(Sources.order)}]")
    folders = {name: config[name] for name in ("store", "predictors", "graphs") if name in config}
    backend = config.get("backend")
    calibration = str(config.get("calibration", Sources.calibration))
    if calibration == OWN:
        calibration = own_calibration(str(config["home"]))
    return Sources(
        **folders,
        order=tuple(map(str, order)),
        backend=None if backend is None else str(backend),
        calibration=calibration,
    )


def bench(config: Mapping[str, Any]) -> Workbench:
    """The workbench of the configuration's sources, the same one for every question."""
    return workbench(sources(config), this_machine, this_node)


def this_machine() -> str:
    """The id of the CPU at hand."""
    from ..harness.environment import cpu_device_id

    return cpu_device_id()


def this_node() -> str:
    """The name under which stores know this machine."""
    from ..harness.environment import node_name

    return node_name()


def stores(config: Mapping[str, Any]) -> list[Path]:
    """The user's store, then the measurements that ship with opcast."""
    return [Path(config["store"]).expanduser(), SHIPPED_STORE]


def registries(config: Mapping[str, Any]) -> list[Path]:
    """The user's predictors, then those that ship with opcast."""
    return [Path(config["predictors"]).expanduser(), SHIPPED_PREDICTORS]


def device(config: Mapping[str, Any]) -> Device:
    """The chosen device with its overrides; a measured one comes from the store.

    Raises DeviceError for an unknown device and RequestError for this machine when nobody measured it yet.
    """
    chosen = dict(config["device"])
    if config.get("cluster") and chosen.get("id") == THIS_MACHINE:
        chosen["id"] = Cluster.from_dict(config["cluster"]).device
    if len(chosen) > 1 and "name" in chosen:
        shipped = str(chosen.get("id")) in known_devices()  # some of its figures changed
        return overridden(load_device(str(chosen["id"])), chosen) if shipped else Device.from_dict(chosen)
    known = bench(config).device(str(chosen.pop("id")))
    return overridden(known, chosen) if chosen else known


def cluster(config: Mapping[str, Any]) -> Cluster | None:
    """The chosen cluster, or None for one device. ClusterError for an impossible figure."""
    return Cluster.from_dict(config["cluster"]) if config.get("cluster") else None


def network(config: Mapping[str, Any]) -> NetworkChoice:
    """How links are simulated, and what is wrong with them. TopologyError and RequestError for what cannot be."""
    for name in LINK_FAULTS if not config.get("cluster") else ():
        if config.get(name):
            raise needs_cluster(f"{name}={config[name]}")
    return NetworkChoice.of(config.get("network", "auto"), *(config.get(name) for name in LINK_FAULTS))


def engine(config: Mapping[str, Any], target: Device, planned: Plan | None = None) -> FusedEngine:
    """The engines of the configuration for a device, with the flows of a plan's groups where links are simulated."""
    return bench(config).engine_with_links(target, cluster(config), network(config), planned)


def predict_request(config: Mapping[str, Any], ops: list[Op], target: Device) -> PredictRequest:
    """The request about some ops, or about the transfers of the configuration where there are none."""
    from ..simulator.question.predictions import PredictRequest

    joined = cluster(config)
    named: tuple[Any, Any] = ((), ())
    if config.get("transfers") and joined is not None:
        from ..simulator.network.query import from_dicts, read

        given = config["transfers"]
        whole = read(Path(given), joined.devices) if isinstance(given, str) else from_dicts(given, joined.devices)
        named = tuple(whole[0]), tuple(whole[1])
    group = config.get("group")
    return PredictRequest(
        ops=tuple(ops),
        device=target,
        cluster=joined,
        cache=config["cache"],
        limits=limits(config),
        group=tuple(group) if isinstance(group, list) else group,
        stride=config.get("stride"),
        all_groups=bool(config.get("all_groups")),
        algorithm=config.get("algorithm"),
        loads=bool(config.get("report") or config.get("picture")),
        transfers=named[0],
        names=named[1],
        network=network(config),
        sources=sources(config),
    )


def simulate_request(config: Mapping[str, Any]) -> SimulateRequest:
    """The request about a step, or about a workload file. The errors of its parts."""
    from ..datasets.loading import load
    from ..simulator.question.plan import Parallel, PlanError
    from ..simulator.question.requests import SimulateRequest
    from ..simulator.question.stragglers import stragglers

    values = config["workload"]
    return SimulateRequest(
        model=model(config),
        work=work(values),
        device=device(config),
        cluster=cluster(config),
        parallel=load(Parallel, config["parallel"], PlanError, "parallel"),
        stack=stack(config, str(values["kind"])),
        precision=str(config["precision"]["dtype"]),
        quantization=str(config["precision"].get("quantization") or ""),
        kv_dtype=str(config["precision"].get("kv_dtype") or ""),
        recompute=str(values.get("recompute", "none")),
        offload=config["offload"],
        passes=config["passes"],
        options=config["options"],
        stragglers=stragglers(config["stragglers"] or []),
        price_per_gpu_hour=config["price_per_gpu_hour"],
        power_cap_w=limits(config).cap_w,
        network=network(config),
        sources=sources(config),
    )


def search_request(config: Mapping[str, Any]) -> SearchRequest:
    """The request about the best of a space of layouts. RequestError for what cannot be."""
    from ..datasets.loading import load
    from ..simulator.question.canonical import RequestError
    from ..simulator.search.request import SearchRequest
    from ..simulator.search.space import Space

    own = ("top", "noise_floor", "sampler", "exhaustive_up_to", "trials", "seed")
    lists = {name: listed(config[name]) for name in ("objectives", "constraints", "prune")}
    values = {name: listed(value) for name, value in config["space"].items()}
    named = values.get("cluster", [])
    joined = config.get("cluster") or (load_cluster(str(named[0])).to_dict() if named else None)
    if not joined:
        raise needs_cluster("a search")
    base = simulate_request({**config, "cluster": joined, "stragglers": []})
    given = {**{name: config[name] for name in own}, **lists, "base": base}
    space = load(Space, values, RequestError, "space", "axis")
    return SearchRequest(space=space, **given)


def served_search_request(config: Mapping[str, Any]) -> ServedSearchRequest:
    """The request about the best ways to serve a model. RequestError for what cannot be."""
    from ..datasets.loading import load
    from ..simulator.question.canonical import RequestError
    from ..simulator.question.serving import ServingTargets
    from ..simulator.search.served.request import ServedSearchRequest, ServedSpace

    own = ("input_len", "output_len", "link_gbps", "link_us", "top", "noise_floor", "confirm")
    given: dict[str, Any] = {name: tuple(listed(config[name])) for name in ("objectives", "constraints")}
    values = {name: listed(value) for name, value in config["space"].items()}
    named = values.get("cluster", [])
    joined = config.get("cluster") or (load_cluster(str(named[0])).to_dict() if named else None)
    if not joined:
        raise needs_cluster("a search")
    plain = {"workload": {"kind": "decode"}, "offload": (), "passes": (), "stragglers": [], "parallel": {}}
    return ServedSearchRequest(
        step=simulate_request({**config, **plain, "cluster": joined}),
        space=load(ServedSpace, values, RequestError, "space", "axis"),
        slo=load(ServingTargets, dict(config["slo"]), RequestError, "slo"),
        **given | {name: config[name] for name in own},
    )


def serving_request(config: Mapping[str, Any]) -> ServingRequest:
    """The request about traffic on a served model, or on iterations whose times are given by hand."""
    from ..simulator.question.serving import ServingRequest
    from ..simulator.serving.connect import usual_engine_stack

    given, config = config, with_engine(config)
    if config["law"] is not None:
        check_arguments(given, config)
    parts = ("law", "traffic", "scheduler", "kv", "slo", "replicas", "attention_dp", "router", "decode_pool")
    values = {name: config[name] for name in (*parts, "price_per_gpu_hour", "intervals", "speculation")}
    step = None
    if config["law"] is None:
        policy = str((config["scheduler"] or {}).get("policy"))
        chosen = config if config.get("stack") else {**config, "stack": usual_engine_stack(policy)}
        work = {"kind": "decode", "expert_load": config["expert_load"]}
        plain = {"workload": work, "offload": (), "passes": (), "stragglers": []}
        plain["options"] = config.get("options") or {}
        step = simulate_request({**chosen, **plain, "price_per_gpu_hour": None})
    pool = dict(values["decode_pool"] or {})
    if step is None:
        pool = {name: value for name, value in pool.items() if name not in OWN_OF_POOL}
    else:
        pool["step"] = decoding_step(chosen, plain, pool)
    return ServingRequest.from_dict({**values, "decode_pool": pool, "step": step})


def decoding_step(config: Mapping[str, Any], plain: Mapping[str, Any], pool: dict[str, Any]) -> SimulateRequest | None:
    """What a replica of the pool that decodes is, where it has a device, cluster or layout of its own; None else.

    These settings are taken out of ``pool``.
    """
    taken = {name: pool.pop(name, None) for name in OWN_OF_POOL}
    own = {name: value for name, value in taken.items() if value}
    if not own:
        return None
    if "cluster" in own:
        own["cluster"] = load_cluster(str(own["cluster"])).to_dict()
        own.setdefault("device", own["cluster"]["device"])
    if "device" in own:
        own["device"] = {"id": str(own["device"])}
    for name in ("parallel", "precision"):
        if isinstance(own.get(name), Mapping):
            own[name] = {**config[name], **own[name]}
    if isinstance(own.get("precision"), str):
        own["precision"] = {"dtype": own["precision"]}
    return simulate_request({**config, **plain, **own, "price_per_gpu_hour": None})


def listed(value: Any) -> list[Any]:
    """The values of a setting that may be one value, a list of them, or ``auto`` or null for none."""
    if value is None or value == "auto":
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def validate_request(config: Mapping[str, Any]) -> ValidateRequest:
    """The request about a table of published results."""
    from ..simulator.question.plan import stack_from_dict
    from ..simulator.question.requests import ValidateRequest

    own = dict(config.get("device") or {})
    if set(own) == {"id"}:  # a name that is no file of ``conf/device``
        own = bench(config).device(str(own["id"])).to_dict()
    return ValidateRequest(
        truth=str(config["truth"] or ""),
        limit=config["limit"],
        rival=str(config["rival"] or ""),
        details=bool(config["details"]),
        device=own,
        cluster=dict(config.get("cluster") or {}),
        stack=stack_from_dict(config["stack"]) if config.get("stack") else None,
        sources=sources(config),
    )


def calibrate_request(config: Mapping[str, Any]) -> CalibrateRequest:
    """The request about tables of known runs."""
    from ..simulator.question.requests import CalibrateRequest

    given = config["tables"] or []
    tables = [given] if isinstance(given, str) else given
    if not isinstance(tables, list):
        raise BadInputError(f"tables={given} must be a list of files, as tables=[steps.csv]")
    start = "none" if config["start"] is None else str(config["start"])
    return CalibrateRequest(tuple(map(str, tables)), config["rows"], start, sources(config))


def work(values: Mapping[str, Any]) -> Work:
    """The workload of the configuration; WorkloadError for what opcast does not simulate."""
    from ..simulator.question.work import Work

    return Work(**{name: value for name, value in values.items() if name != "recompute"})


def stack(config: Mapping[str, Any], work_kind: str) -> Stack | None:
    """The chosen framework with its overrides, which without a choice go to the usual one; None without either."""
    from ..simulator.question.plan import stack_from_dict
    from ..simulator.question.requests import usual_stack

    chosen = config.get("stack") or {}
    if "id" in chosen:
        return stack_from_dict(chosen)
    usual = usual_stack(work_kind, alone=not config.get("cluster"))
    return stack_from_dict(dataclasses.asdict(usual) | chosen) if chosen else None


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


def limits(config: Mapping[str, Any]) -> Limits:
    """``power_cap_w`` and ``sm_clock_mhz`` of a configuration. PowerError for what is no positive number."""
    return Limits(config.get("power_cap_w"), config.get("sm_clock_mhz"))
