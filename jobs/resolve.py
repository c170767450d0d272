"""From a verb's configuration to a request and the workbench that answers it: the door between Hydra and the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..datasets.clusters import Cluster
from ..datasets.devices import Device, known_devices, load_device, overridden
from ..datasets.ops import Op
from ..models.power import Limits
from ..simulator.engines import EngineError, FusedEngine
from ..simulator.question.calibration import OWN, own_calibration
from ..simulator.question.canonical import RequestError
from ..simulator.question.declaration import value_at
from ..simulator.question.network import LINK_FAULTS, NetworkChoice, needs_cluster
from ..simulator.question.place import THIS_MACHINE
from ..simulator.question.sources import Sources
from ..simulator.question.stack import stack_from_dict
from ..simulator.trace.models import shipped_config
from ..simulator.workbench import SHIPPED_PREDICTORS, SHIPPED_STORE, Workbench, workbench
from . import questions
from .show import BadInputError, say

if TYPE_CHECKING:
    from ..simulator.question.plan import Plan, Stack
    from ..simulator.question.predictions import PredictRequest
    from ..simulator.question.requests import CalibrateRequest, ValidateRequest

FIGURES = tuple(each.name for each in dataclasses.fields(Cluster))  # which a configuration has within its cluster
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
    return bench_of(sources(config))


def bench_of(sources: Sources) -> Workbench:
    """The workbench of sources, on the machine at hand: the same for every face that asks."""
    return workbench(sources, this_machine, this_node)


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
    if "id" not in chosen:
        raise RequestError(f"device.{next(iter(chosen), 'id')} is of a device that was taken away: leave ~device out")
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


def predict_request(config: Mapping[str, Any], ops: Sequence[Op], target: Device) -> PredictRequest:
    """The request about some ops, or about the transfers of the configuration where there are none."""
    from ..simulator.question.keywords import predict_request

    moved = config.get("transfers")
    what = Path(moved) if isinstance(moved, str) else moved or ops
    values = {**questions.usual("predict"), **set_values("predict", config)}
    request = predict_request(what, target, cluster(config), sources(config), values, {})
    return dataclasses.replace(request, loads=bool(config.get("report") or config.get("picture")))


def request_of(verb: str, config: Mapping[str, Any]) -> Any:
    """The request of a verb's configuration. The errors of its parts."""
    return questions.request_of(verb, given(verb, config), sources(config), say)


def given(verb: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """What a configuration says, by the names of the verb's settings; beside a law nothing of a model."""
    made = set_values(verb, config)
    if config.get("law") is not None:
        return {name: value for name, value in made.items() if name in questions.beside_law()}
    joined = cluster(config)
    chosen = {"model": model(config), "cluster": joined, "device": named_device(config)}
    if verb == "search_serving" and config["framework"] and not made["space"].get("policy"):
        made |= {"space": made["space"] | {"policy": policies(str(config["framework"]))}}
    return made | chosen | {"stack": stack(config, verb)}


def policies(framework: str) -> list[str]:
    """The policy of what a framework starts, as ``space.policy``; none where it starts any engine."""
    from ..simulator.search.served.launch import engine_started

    engine_name = engine_started(framework)
    return [engine_name] if engine_name else []


def set_values(verb: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a configuration has, by their names; none of those that a cluster has within it."""
    values = {each.name: value_at(config, each.path) for each in questions.settings(verb)}
    return {name: value for name, value in values.items() if value is not MISSING and name not in FIGURES}


def named_device(config: Mapping[str, Any]) -> Device | str:
    """The chosen device with its overrides; without a choice the name of this machine, or of the cluster's."""
    return THIS_MACHINE if dict(config["device"]) == {"id": THIS_MACHINE} else device(config)


def validate_request(config: Mapping[str, Any]) -> ValidateRequest:
    """The request about a table of published results."""
    from ..simulator.question.requests import ValidateRequest

    own = dict(config.get("device") or {})
    if set(own) == {"id"}:  # a name that is no file of ``conf/device``
        own = bench(config).device(str(own["id"])).to_dict()
    return ValidateRequest(
        truth=str(config["truth"] or ""),
        rules=str(config["rules"] or ""),
        limit=config["limit"],
        rival=str(config["rival"] or ""),
        details=bool(config["details"]),
        half=str(config["half"] or ""),
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
    rules = str(config["rules"] or "")
    return CalibrateRequest(tuple(map(str, tables)), config["rows"], start, rules, sources(config))


def stack(config: Mapping[str, Any], verb: str) -> Stack | None:
    """The chosen framework with its overrides, which without a choice go to the one that a search's launch file is for,
    or to the usual one; None without any."""
    from ..simulator.question.requests import usual_stack
    from ..simulator.serving.connect import usual_serving_stack

    chosen, launched = config.get("stack") or {}, config.get("framework") if verb == "search" else None
    if "id" in chosen:
        return stack_from_dict(chosen)
    if launched:
        from ..simulator.search.launch import stack_of

        usual = stack_of(str(launched))
    elif not chosen:
        return None
    elif verb == "serving":
        usual = usual_serving_stack(str((config["scheduler"] or {}).get("policy")))
    else:
        work = config.get("workload") or {"kind": questions.QUESTIONS[verb].kind}
        usual = usual_stack(str(work["kind"]), alone=not config.get("cluster"))
    return stack_from_dict(dataclasses.asdict(usual) | chosen)


def model(config: Mapping[str, Any]) -> str | dict[str, Any]:
    """The chosen model: a path, hub id or ``module:callable`` as given, or a shipped configuration with overrides."""
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
