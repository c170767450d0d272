"""From the words after a verb to its configuration as plain values, by Hydra."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..datasets.devices import is_file_name
from ..datasets.dtypes import weight_bits
from . import complaints, settings
from .show import CONFIG_DIRECTORY, BadInputError

if TYPE_CHECKING:
    from omegaconf import DictConfig

STEP_CHOICE = {"device": "device.id", "model": "+model.path", "cluster": "+cluster.path"}  # of verbs that ask of a step
STEP_ADDED = ("device.", "cluster.", "stack.", "options", "precision.quantization")


def as_override(module: ModuleType, text: str) -> str:
    """A bare word is the verb's subject (``opcast list devices``); ``ADDED`` settings need no ``+`` to be new."""
    subject = getattr(module, "SUBJECT", None)
    text = settings.by_alias(text)
    of_bits = text.removeprefix("precision=")
    if of_bits != text and of_bits.startswith("w") and not precision_exists(of_bits) and weight_bits(of_bits):
        return f"++precision.quantization={of_bits}"
    if text.startswith(getattr(module, "ADDED", ())):
        return f"++{text}"
    if subject and text and "=" not in text and text[0] not in "~+":
        return f"{subject}={quoted(text)}"
    for group, free in getattr(module, "FREE_CHOICE", {}).items():
        choice = text.removeprefix(f"{group}=")
        if choice == text or choice[:1] in ("{", "'", '"'):  # another setting, or one that is quoted already
            continue
        if "," in choice and (CONFIG_DIRECTORY / group).is_dir():  # a sweep over Hydra's own choices
            continue
        if choice == "null" and group in ("cluster", "device") and free.startswith("+"):  # a group that may be left out
            continue
        if group == "model":
            choice = shipped_choice(choice)
            text = f"{group}={choice}"
        if not (CONFIG_DIRECTORY / group / f"{choice}.yaml").is_file():
            return f"{free}={quoted(choice)}"
    return text


def precision_exists(name: str) -> bool:
    """Whether a precision has a file of its own."""
    return (CONFIG_DIRECTORY / "precision" / f"{name}.yaml").is_file()


def shipped_choice(name: str) -> str:
    """A model's own name for another spelling of it that says nothing of the format of its weights."""
    from ..datasets.model_names import shipped_model

    meant = None if Path(name).expanduser().exists() else shipped_model(name)
    return meant.id if meant is not None and meant.quantization is None else name


def quoted(value: str) -> str:
    """A value that Hydra's grammar takes as one string, whatever stands in it."""
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def compose(verb: str, overrides: Sequence[str]) -> dict[str, Any]:
    """The verb's configuration as plain values, checked. BadInputError in one line for what it cannot be."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        values = plain(composed(verb, overrides))
    except (HydraException, OmegaConfBaseException, ValueError, TypeError) as error:  # the last two: no choice at all
        if interrupted(error):
            raise KeyboardInterrupt from None
        raise BadInputError(complaints.explain(verb, error, overrides, composed)) from None
    settings.check(verb, values)
    return values


def interrupted(error: BaseException | None) -> bool:
    """Whether what went wrong is that the user pressed Ctrl-C: Hydra makes an error of its own of that."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def composed(verb: str, overrides: Sequence[str]) -> DictConfig:
    """The verb's configuration as Hydra composes it; raises what Hydra raises."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    register(verb, [text for text in overrides if text.startswith("op=")])
    with initialize_config_dir(str(CONFIG_DIRECTORY), version_base="1.3"):
        return hydra_compose(verb, overrides=list(overrides))


@contextmanager
def any_help() -> Iterator[None]:
    """Within, argparse checks help that is text alone: Hydra gives it an object, which Python 3.14 would refuse."""
    container: Any = argparse._ActionsContainer
    check = getattr(container, "_check_help", None)  # from 3.14 on

    def check_text(parser: Any, action: argparse.Action) -> None:
        if check is not None and isinstance(action.help, str):
            check(parser, action)

    if check is None:
        yield
        return
    container._check_help = check_text
    try:
        yield
    finally:
        container._check_help = check


def plain(config: DictConfig) -> dict[str, Any]:
    """A configuration as plain values, its references filled in."""
    from omegaconf import OmegaConf

    from ..datasets.devices import Device

    values = OmegaConf.to_container(config, resolve=True, throw_on_missing=False)
    assert isinstance(values, dict)
    config_values = {str(key): value for key, value in values.items()}
    if isinstance(config_values.get("cluster"), dict) and "path" in config_values["cluster"]:
        config_values["cluster"] = cluster_of_file(config_values["cluster"])
    device = config_values.get("device")
    if isinstance(device, dict) and is_file_name(str(device.get("id"))):
        config_values["device"] = of_file("device", Path(device["id"]), device, "id")
        Device.from_dict(config_values["device"])  # says what the file lacks
    return config_values


def cluster_of_file(values: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of ``cluster=FILE.yaml``, with those that were given beside it. BadInputError."""
    from ..datasets.clusters import load_cluster

    path = Path(str(values["path"]))
    if not path.suffix and "/" not in str(path) and not path.is_file():
        load_cluster(str(path))  # says which names are near
    return of_file("cluster", path, values, "path")


def of_file(group: str, path: Path, values: Mapping[str, Any], file_key: str) -> dict[str, Any]:
    """What a file in the format of ``conf/GROUP`` says, and the other ``values`` instead where they are given.

    ``file_key`` is the value that names the file. BadInputError for a file that cannot be read.
    """
    from ..datasets.reading import read_yaml

    path = path.expanduser()
    if not path.is_file():
        raise BadInputError(f"{group}={path}: there is no such file, nor a {group} of that name")
    read = read_yaml(path, BadInputError, f"{group}={path}")
    if not isinstance(read, dict):
        raise BadInputError(f"{group}={path} must be a mapping as in conf/{group}")
    return {**read, **{name: value for name, value in values.items() if name != file_key}}


def register(verb: str, chosen: list[str]) -> None:
    """Make the settings of a verb's question known to Hydra, with their defaults; for ``predict`` also the op kinds.

    An op is a Hydra group, so that ``op=gemm op.m=…`` composes: a choice per kind. Of other verbs it is a setting.
    """
    from hydra.core.config_store import ConfigStore

    from ..datasets.ops import KINDS
    from ..simulator.question.declaration import defaults_of
    from .questions import CHOICES, of_choice, of_command

    store = ConfigStore.instance()
    if declared_settings := of_command(verb):
        store.store(group="questions", name=verb, node=defaults_of(declared_settings), package="_global_")
    for group in CHOICES.keys() & settings.defaults(verb).keys():
        for choice in CHOICES[group]:
            store.store(group=group, name=choice, node=defaults_of(of_choice(group, choice)))
    store.repo.pop("op", None)
    if verb != "predict":
        return
    for name, kind in KINDS.items():
        if chosen and f"op={name}" not in chosen and any(text[3:] in KINDS for text in chosen):
            continue
        dims = {dim.name: "???" if dim.default is None else dim.default for dim in kind.dims}
        store.store(group="op", name=name, node={"kind": name, **dims, "dtype": "bf16", "out_dtype": None})
