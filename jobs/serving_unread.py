"""Settings of ``opcast serving`` that a run would not read: refused, so that nobody takes its answer for theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..simulator.question.declaration import plain_default
from ..simulator.question.unread import refuse_unread
from .questions import of_model, settings
from .show import BadInputError

if TYPE_CHECKING:
    from ..simulator.question.serving import ServingRequest

WITHIN = ("engine.", "kv.", "decode_pool.", "second_kind.")  # groups of which a law leaves the rest


def check_words(words: Sequence[str]) -> None:
    """BadInputError for settings of a model beside a law, as they were typed."""
    named = [word.lstrip("+~").partition("=") for word in words]
    if not any(of("law", name) and value != "null" for name, _, value in named):
        return
    names = {path if path.startswith(WITHIN) else path.partition(".")[0] for path in of_model()}
    for name, _, value in named:
        if value != "null" and any(of(setting, name) for setting in names):
            raise BadInputError(
                f"{name}={value} says what a model runs on: with law there is none; leave out one of them"
            )


def of(setting: str, name: str) -> bool:
    """Whether a name is that setting, or one inside it."""
    return name == setting or name.startswith((f"{setting}.", f"{setting}@"))


def check_read(config: Mapping[str, Any], request: ServingRequest) -> None:
    """BadInputError for settings that this kind of run would not read."""
    if config["rates"] and config["what"] != "sweep":
        raise BadInputError(f"rates={config['rates']} are of `opcast serving sweep`: leave them out, or ask for it")
    if config["power_caps_w"] and config["what"] != "caps":
        raise BadInputError(
            f"power_caps_w={config['power_caps_w']} are of `opcast serving caps`: take power_cap_w for one run"
        )
    scaled = config["what"] == "run" and request.autoscale.policy is not None
    if config["picture"] and config["what"] != "caps" and not scaled:
        raise BadInputError(
            f"picture={config['picture']} is of `opcast serving caps` and of autoscale: take report=FILE.html"
        )
    pool = request.decode_pool
    if config["what"] == "compare" or pool.replicas:
        return
    usual = next(plain_default(setting.default) for setting in settings("serving") if setting.name == "decode_pool")
    pool_values = config["decode_pool"] or {}
    unread = {f"decode_pool.{name}": value for name, value in pool_values.items() if value != usual.get(name)}
    refuse_unread(unread, "with decode_pool.replicas=0")
