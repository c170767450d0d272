"""Settings of ``opcast serving`` that a run would not read: refused, so that nobody takes its answer for theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .show import BadInputError

if TYPE_CHECKING:
    from ..simulator.question.serving import ServingRequest

OF_MODEL = (  # what says how long iterations take and how much memory they leave, in whose place a law stands
    *("model", "device", "cluster", "parallel", "precision", "stack", "expert_load", "calibration", "calibrate"),
    *("backend", "power_cap_w", "engine.order", "kv.fraction", "kv.graphs", "kv.seen", "intervals"),
    *("decode_pool.device", "decode_pool.cluster", "decode_pool.parallel", "decode_pool.precision"),
)
OF_ARGUMENTS = ("parallel", "options", "precision", "kv")  # groups in which arguments of an engine say the same


def check_words(words: Sequence[str]) -> None:
    """BadInputError for settings of a model beside a law, as they were typed."""
    named = [word.lstrip("+~").partition("=") for word in words]
    if not any(of("law", name) and value != "null" for name, _, value in named):
        return
    for name, _, value in named:
        if value != "null" and any(of(each, name) for each in OF_MODEL):
            raise BadInputError(
                f"{name}={value} says what a model runs on: with law there is none; leave out one of them"
            )


def of(setting: str, name: str) -> bool:
    """Whether a name is that setting, or one inside it."""
    return name == setting or name.startswith((f"{setting}.", f"{setting}@"))


def check_arguments(config: Mapping[str, Any], made: Mapping[str, Any]) -> None:
    """BadInputError where arguments of an engine say what a law leaves no room for: ``made`` is the configuration with
    them, ``config`` without."""
    for group in OF_ARGUMENTS:
        before, after = config.get(group) or {}, made.get(group) or {}
        for name, value in after.items():
            said = value != before.get(name) and not (group == "kv" and name in ("blocks", "block_tokens"))
            if said:
                raise BadInputError(f"args say {group}.{name}={value}, which needs a model: with law there is none")


def check_read(config: Mapping[str, Any], request: ServingRequest) -> None:
    """BadInputError for settings that this kind of run would not read."""
    if config["rates"] and config["what"] != "sweep":
        raise BadInputError(f"rates={config['rates']} are of `opcast serving sweep`: leave them out, or ask for it")
    pool = request.decode_pool
    if config["what"] == "compare" or pool.replicas:
        return
    usual = type(pool)()
    unread = [name for name, value in (config["decode_pool"] or {}).items() if value != getattr(usual, name, None)]
    if unread:
        raise BadInputError(f"decode_pool.{unread[0]} is not read: no replica only decodes (decode_pool.replicas=0)")
