"""What each verb asks, and how names with plain values become its request: the one door of all faces.

The command line, Python and HTTP hand over what was given, by the names of :func:`settings`. Nothing here knows which
of them asks, and none of them has a default of its own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import lru_cache
from typing import Any, get_origin, get_type_hints

from ..datasets.clusters import Cluster, load_cluster
from ..datasets.loading import load, nearest
from ..simulator.question.calibration import NONE, OWN, own_calibration
from ..simulator.question.canonical import RequestError
from ..simulator.question.declaration import RequestSetting, settings_of
from ..simulator.question.place import THIS_MACHINE
from ..simulator.question.sources import Sources

LINKS = ("network", "faults", "fault_draw", "faults_study", "stragglers")
OF_SOURCES = ("engines", "backend", "calibration")
OF_TRAINING = ("recompute", "micro_batches")
# settings that the command line calls by their name, although they stand in a group
CHOSEN_BY_NAME = {"workload": "workload", "precision": "precision", "engine": "engine"}


@dataclass(frozen=True)
class VerbQuestion:
    """What a verb asks: its request, and what of a step it has.

    ``step`` is the field that is a step of a model, with work of a ``kind`` (empty: the request is that step, of any
    kind). Of the settings of such a step it has not those that it ``leaves_out`` (with a dot: those of a group), and of
    those of its work only ``works`` (none: all), which then stand in no group. ``calibration`` is what answers where
    none is named.
    """

    request: str
    step: str = ""
    kind: str = ""
    leaves_out: tuple[str, ...] = ()
    works: tuple[str, ...] = ()
    calibration: str = OWN

    @property
    def kind_of_request(self) -> type:
        """The class of the request."""
        module, name = self.request.rsplit(".", 1)
        return getattr(importlib.import_module(f"..simulator.{module}", __package__), name)


QUESTIONS = {
    "predict": VerbQuestion("question.predictions.PredictRequest", leaves_out=("calibration",)),
    "simulate": VerbQuestion("question.requests.SimulateRequest"),
    "search": VerbQuestion(
        "search.request.SearchRequest", step="base", kind="train", leaves_out=(*LINKS, "micro_batches", "workload")
    ),
    # hosts of engines are fitted without effects of known steps (docs/serving.md)
    "search_serving": VerbQuestion(
        "search.served.request.ServedSearchRequest",
        step="step",
        kind="decode",
        leaves_out=(*LINKS, *OF_TRAINING, "workload", "offload", "passes", "parallel."),
        works=("expert_load",),
        calibration=NONE,
    ),
    "plan": VerbQuestion(
        "job.request.PlanRequest", step="step", kind="train", leaves_out=("faults_study", "micro_batches", "workload")
    ),
    "posttrain": VerbQuestion(
        "post_training.request.PostTrainRequest",
        step="step",
        kind="train",
        leaves_out=("faults_study", "micro_batches", "workload"),
    ),
    "compare": VerbQuestion("chips.request.CompareRequest", step="step", leaves_out=("faults_study",)),
    "upgrade": VerbQuestion("upgrade.request.UpgradeRequest", step="step", leaves_out=("faults_study",)),
    "serving": VerbQuestion(
        "question.serving.ServingRequest",
        step="step",
        kind="decode",
        leaves_out=(*OF_TRAINING, "workload"),
        works=("expert_load",),
        calibration=NONE,
    ),
}


@lru_cache
def settings(verb: str) -> tuple[RequestSetting, ...]:
    """The settings of a verb: those of its request, then those of the step within it."""
    question = QUESTIONS[verb]
    own_settings = settings_of(question.kind_of_request)
    if verb == "serving":
        from ..simulator.question.serving import EngineStart

        own_settings = (*own_settings, *settings_of(EngineStart))
    if question.step:
        from ..simulator.question.requests import SimulateRequest

        names = {setting.name for setting in own_settings}
        own_settings = (
            *own_settings,
            *(setting for setting in settings_of(SimulateRequest) if setting.name not in names),
        )
    chosen_settings = (_placed(setting, question) for setting in own_settings if _taken(setting, question))
    return (*chosen_settings, *_figures(verb))


@lru_cache
def usual(verb: str) -> dict[str, Any]:
    """The settings of a verb with their defaults."""
    return {setting.name: setting.default for setting in settings(verb)}


def _taken(setting: RequestSetting, question: VerbQuestion) -> bool:
    """Whether a verb has a setting, by its name or by the group that it stands in."""
    group, dot, _ = setting.path.partition(".")
    if question.works and dot and group == "workload":
        return setting.name in question.works
    read = not (question.kind and setting.of) or question.kind in setting.of
    return read and setting.name not in question.leaves_out and f"{group}{dot}" not in question.leaves_out


def _placed(setting: RequestSetting, question: VerbQuestion) -> RequestSetting:
    if setting.name == "calibration":
        return replace(setting, default=question.calibration)
    return replace(setting, path=setting.name) if setting.name in question.works else setting


def _figures(verb: str) -> tuple[RequestSetting, ...]:
    """Figures of a cluster that go before its own; of an op, whose dims may have such names, only how many nodes."""
    names: tuple[str, ...] = ("nodes",)
    if verb != "predict":
        from ..simulator.question.keywords import OF_CLUSTER

        names = OF_CLUSTER
    types = get_type_hints(Cluster)
    help_text = "of the cluster, in place of its own"
    return tuple(RequestSetting(name, f"cluster.{name}", types[name], None, help_text, chosen=True) for name in names)


def sources_of(verb: str, values: Mapping[str, Any], folders: Sources, home: str) -> Sources:
    """Where answers come from: the folders of a face, with what was given, else as the verb has it."""
    order = folders.order if values.get("engines") is None else values["engines"]
    calibration = str(values.get("calibration") or usual(verb).get("calibration") or folders.calibration)
    backend = values.get("backend") or folders.backend
    if not isinstance(order, (list, tuple)):
        raise RequestError(f"engines={order!r} must be a list of engines, such as {list(Sources.order)}")
    return replace(
        folders,
        order=tuple(order),
        backend=None if backend is None else str(backend),
        calibration=own_calibration(home) if calibration == OWN else calibration,
    )


def check_names(verb: str, values: Mapping[str, Any], beside: Sequence[str] = ()) -> None:
    """RequestError, with the nearest name, for a setting that the verb has not."""
    names = [*(setting.name for setting in settings(verb)), *beside]
    for name in values:
        if name not in names:
            raise RequestError(f"{verb.replace('_', ' ')} has no setting {name!r}; {nearest(name, names)}")


def tell_nobody(_: str) -> None:
    """Nobody is told."""


def request_of(
    verb: str, values: Mapping[str, Any], sources: Sources, tell: Callable[[str], None] = tell_nobody
) -> Any:
    """The request of what was given: names of :func:`settings`, of which null ones were not given.

    Beside plain values a cluster, device, framework, workload or plan may be given as it is. ``tell`` is told what of
    an engine's arguments is not simulated. Raises RequestError and the errors of the request's parts.
    """
    check_names(verb, values, ("plan",) if verb in ("simulate", "search") else ())
    values_set = {name: value for name, value in values.items() if value is not None and name not in OF_SOURCES}
    if verb == "serving":
        return _serving(values_set, sources, tell)
    if verb == "simulate":
        return step_of(verb, values_set, sources)
    question = QUESTIONS[verb]
    request_fields = {field.name for field in fields(question.kind_of_request)} - {question.step}
    kinds = get_type_hints(question.kind_of_request)
    searched: dict[str, Any] = {}
    if "space" in kinds:
        axes = values_set.get("space", {})
        kind = kinds["space"]
        searched["space"] = axes if isinstance(axes, kind) else load(kind, _axes(axes), RequestError, "space", "axis")
        if "cluster" not in values_set and searched["space"].cluster:
            values_set["cluster"] = searched["space"].cluster[0]
    arguments = {name: values_set[name] for name in request_fields if name in values_set and name != "space"}
    arguments |= {name: tuple(as_list(value)) for name, value in arguments.items() if get_origin(kinds[name]) is tuple}
    arguments |= {
        name: load(kinds[name], value, RequestError, name)
        for name, value in arguments.items()
        if isinstance(kinds[name], type) and is_dataclass(kinds[name]) and not isinstance(value, kinds[name])
    }
    step = step_of(verb, {name: value for name, value in values_set.items() if name not in request_fields}, sources)
    return question.kind_of_request(**arguments | searched | {question.step: step})


def step_of(verb: str, values: Mapping[str, Any], sources: Sources) -> Any:
    """The step of what was given, of the kind that the verb asks about."""
    from ..simulator.question.keywords import simulate_request

    if "model" not in values:
        raise RequestError("a step needs a model: model=llama3_8b (`opcast list models`)")
    work = values.get("workload") or QUESTIONS[verb].kind or "train"
    device = values.get("device") or THIS_MACHINE
    step_values = {name: value for name, value in values.items() if name not in ("model", "workload", "device")}
    return simulate_request(values["model"], work, device, sources, step_values)


def _axes(axes: Any) -> Any:
    return {name: as_list(value) for name, value in axes.items()} if isinstance(axes, Mapping) else axes


def as_list(value: Any) -> list[Any]:
    """The values of a setting that may be one value, a list of them, or ``auto`` or null for none."""
    if value is None or value == "auto":
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _serving(values: dict[str, Any], sources: Sources, tell: Callable[[str], None]) -> Any:
    """Traffic on a model, or on iterations whose times are given by hand. RequestError where both are."""
    from ..simulator.question.serving import OF_POOL, Scheduler, ServingRequest
    from ..simulator.serving.connect import usual_serving_stack
    from .serving_engine import apply_engine

    law = values.get("law") is not None
    outside_model = beside_law() - {"engine", "args"}
    groups = ("kv", *SECOND_POOLS)
    names_set = [*values, *(f"{group}.{name}" for group in groups for name in _set(values.get(group)))]
    beside = [name for name in names_set if law and name in of_model().values()]
    if beside:
        raise RequestError(f"{', '.join(beside)} say what a model runs on: with law there is none")
    values = apply_engine(values, settings("serving"), tell)
    unpacked_by = values.pop("unpacked_by", "")
    arguments = {name: values[name] for name in outside_model if name in values}
    for name in ("scheduler", *SECOND_POOLS):
        if not isinstance(arguments.get(name, {}), Mapping):
            raise RequestError(f"{name}={arguments[name]!r} must be settings of their own")
    pools = {group: dict(arguments.get(group) or {}) for group in SECOND_POOLS}
    if not law and "model" in values:
        step = {name: value for name, value in values.items() if name not in outside_model}
        policy = str((arguments.get("scheduler") or {}).get("policy") or Scheduler.policy)
        step.setdefault("stack", usual_serving_stack(policy))
        arguments["step"] = replace(step_of("serving", step, sources), unpacked_by=unpacked_by)
        for group, pool in pools.items():
            if words := {name: value for name in OF_POOL if (value := pool.pop(name, None))}:
                pool["step"] = replace(step_of("serving", _other(group, step, words), sources), unpacked_by=unpacked_by)
    pools = {
        group: {name: value for name, value in pool.items() if name not in OF_POOL} for group, pool in pools.items()
    }
    return ServingRequest.from_dict(arguments | {group: pool for group, pool in pools.items() if pool})


SECOND_POOLS = ("decode_pool", "second_kind")  # replicas that may be on devices of their own


@lru_cache
def beside_law() -> frozenset[str]:
    """The settings of `serving` that say nothing of what a model runs on, or of how sure its times are."""
    from ..simulator.question.serving import ServingRequest

    return frozenset(field.name for field in fields(ServingRequest)) - {"step", "intervals"} | {"engine", "args"}


@lru_cache
def of_model() -> dict[str, str]:
    """The settings of `serving` that mean nothing beside a law: as the command line has them, and by their names."""
    from ..simulator.question.serving import OF_POOL

    by_path = {setting.path: setting.name for setting in settings("serving") if setting.name not in beside_law()}
    by_path |= {f"kv.{name}": f"kv.{name}" for name in ("fraction", "graphs", "seen")}
    return by_path | {f"{pool}.{name}": f"{pool}.{name}" for pool in SECOND_POOLS for name in OF_POOL}


def _set(group: Any) -> list[str]:
    """The settings of a group that are neither null nor empty."""
    return [name for name, value in group.items() if value] if isinstance(group, Mapping) else []


def _other(pool: str, step: Mapping[str, Any], words: Mapping[str, Any]) -> dict[str, Any]:
    """What a replica of the second ``pool`` is: the step of the others with its own device, cluster or layout."""
    from ..simulator.question.keywords import OF_CLUSTER

    other_step = dict(step)
    if "cluster" in words:
        other_step = {name: value for name, value in other_step.items() if name not in OF_CLUSTER}
        other_step["cluster"] = load_cluster(str(words["cluster"]))
        other_step["device"] = other_step["cluster"].device
    if "device" in words:
        other_step["device"] = str(words["device"])
    precision = words.get("precision", {})
    if isinstance(precision, str):
        other_step = {name: value for name, value in other_step.items() if name != "quantization"}
        precision = {"dtype": precision}
    for name, group in (("parallel", words.get("parallel", {})), ("precision", precision)):
        if not isinstance(group, Mapping):
            raise RequestError(f"{pool}.{name}={group!r} must be settings of their own, such as {{tp: 8}}")
        degrees = {"precision" if name_ == "dtype" else name_: value for name_, value in group.items()}
        check_names("serving", degrees)
        other_step |= degrees
    return other_step


GROUPS = ("workload", "parallel", "precision", "cluster", "space")  # that the command line chooses as a whole


def of_command(verb: str) -> tuple[RequestSetting, ...]:
    """The settings of a verb that stand by themselves on its command line: none that a group of choices has."""
    if verb not in QUESTIONS:
        return ()
    return tuple(
        setting for setting in settings(verb) if not setting.chosen and setting.path.partition(".")[0] not in GROUPS
    )


CHOICES: dict[str, dict[str, str]] = {  # groups whose choices are declared, not files of ``conf``
    "parallel": {"default": "question.plan.Parallel"},
    "space": {"training": "search.space.Space", "serving": "search.served.request.ServedSpace"},
    "workload": dict.fromkeys(("batch", "decode", "generate", "prefill", "train"), "question.requests.SimulateRequest"),
}


def of_choice(group: str, choice: str) -> tuple[RequestSetting, ...]:
    """The settings that a declared choice of a group has, such as ``workload=train``, by their names in it."""
    settings_all = settings_of(VerbQuestion(CHOICES[group][choice]).kind_of_request)
    if group != "workload":
        return settings_all
    within = [
        setting
        for setting in settings_all
        if setting.path.startswith("workload.") and (not setting.of or choice in setting.of)
    ]
    named = [replace(setting, name=setting.path.partition(".")[2]) for setting in within]
    return tuple(
        replace(setting, path=setting.name, default=choice if setting.name == "kind" else setting.default)
        for setting in named
    )
