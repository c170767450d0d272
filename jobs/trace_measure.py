"""``opcast trace measure``: the rows that a profile holds, into the store, and predictors that have learned them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..datasets.devices import device_of_file, is_file_name
from ..datasets.store import Store
from . import resolve
from .show import BadInputError, print_json, say, wants_json
from .trace_files import given


def run(config: dict[str, Any]) -> int:
    """Import a profile's operators and collectives; with ``train`` learn the kinds that got rows."""
    from ..datasets.sources.importing import import_into
    from ..datasets.sources.options import ImportOptions
    from ..datasets.sources.tables import SourceError
    from .importing import show

    path = given(config, "path", "a profile of PyTorch, or a folder of them")
    store = Store(Path(str(config["store"])).expanduser())
    named = str(config["measured_on"] or "")
    options = ImportOptions(device=device_of_file(Path(named)) if is_file_name(named) else named or None)
    try:
        report = import_into(store, "kineto", str(path), options)
    except SourceError as error:  # in the words of this verb's settings
        raise BadInputError(str(error).replace("say device=…", "say measured_on=…")) from None
    trained = train_kinds(config, store, sorted(report.written)) if config["train"] and report.written else {}
    if wants_json(config):
        print_json({**report.to_dict(), "store": str(store.path), "trained": trained})
        return 0
    show(report, store)
    for label, card in trained.items():
        say(f"{label}: {card.get('error') or card.get('predictor')}")
    return 0


def train_kinds(config: dict[str, Any], store: Store, written: list[tuple[str, str]]) -> dict[str, Any]:
    """Train the kinds of each device that got rows, on all rows of the store; cards by kind."""
    from .train import fit_and_register, train_request

    trained: dict[str, Any] = {}
    for device in sorted({device for _, device in written}):
        kinds = [kind for kind, of in written if of == device]
        target = resolve.device({**config, "device": {"id": device}})
        request = train_request({**config, "op": kinds}, target)
        trained |= fit_and_register(store, target, request)
    return trained
