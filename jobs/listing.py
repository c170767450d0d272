"""``opcast list devices|chips|clusters|models|ops|predictors|stacks|figures|precisions``: what opcast knows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..datasets.clusters import known_clusters, load_cluster
from ..datasets.devices import Device, known_devices, load_device
from ..datasets.near import meant
from ..datasets.ops import KINDS
from ..datasets.store import Store
from ..models.kinship import voices
from ..models.registry import Registry
from ..simulator.network.tunings import PCIE_TUNINGS, TUNINGS, TUNINGS_SOURCE
from ..simulator.question.stack import known_stacks, load_stack
from ..simulator.trace.models import known_models
from . import resolve
from .show import BadInputError, print_json, table, wants_json

SUBJECT = "what"
Rows = tuple[tuple[str, ...], list[tuple[object, ...]]]


def run(config: dict[str, Any]) -> int:
    """Print the chosen list; returns the exit code."""
    listings = {
        "devices": devices,
        "chips": chips,
        "clusters": clusters,
        "models": models,
        "ops": ops,
        "predictors": predictors,
        "stacks": stacks,
        "figures": figures,
        "precisions": precisions,
    }
    chosen = config["what"]
    if not isinstance(chosen, str) or chosen not in listings:
        complaint = f", not {chosen!r}{meant(chosen, listings)}" if chosen else ""
        raise BadInputError(f"`opcast list` takes {', '.join(listings)}{complaint}")
    as_json = wants_json(config)
    heads, rows = listings[chosen](config)
    if as_json:
        print_json({chosen: [dict(zip(heads, row, strict=True)) for row in rows]})
    else:
        table("", heads, rows)
    return 0


def devices(config: Mapping[str, Any]) -> Rows:
    """Shipped devices, then those measured into the store."""
    all_devices = [load_device(name) for name in known_devices()]
    for path in resolve.stores(config):
        if path.is_dir():
            store = Store(path)
            all_devices += [
                measured for name in store.measured_devices() if (measured := store.device(name)) is not None
            ]
    learned = {name for path in resolve.registries(config) for name in Registry(path).devices()}
    learned_devices = [d for d in all_devices if d.id in learned]
    heads = ("id", "name", "units", "bf16 TFLOP/s", "memory GiB", "GB/s", "last-level MiB", "TDP W", "learned from")
    return heads, [
        (
            d.id,
            d.name,
            d.compute_units,
            _rate(d.tensor_tflops),
            round(d.memory_gib),
            round(d.memory_gbps),
            d.l2_mib,
            d.tdp_w,
            _learned_from(d, learned_devices),
        )
        for d in all_devices
    ]


def chips(config: Mapping[str, Any]) -> Rows:
    """What stands behind answers for each chip, by kind of op and format, and how far such answers were off."""
    from ..simulator.predict.chips import chip_answers

    stores, registries = resolve.stores(config), resolve.registries(config)
    names = known_devices() if config["chip"] is None else [config["chip"]]
    chips_ = [resolve.bench(config).device(str(name)) for name in names]
    answers = chip_answers([chip for chip in chips_ if not chip.synchronous], stores, registries)
    heads = ("chip", "op", "kind", "format", "answer", "of", "median error %", "interval factor")
    return heads, [
        (
            answer.device,
            answer.label,
            answer.kind,
            answer.dtype,
            answer.how,
            answer.of,
            None if answer.error_percent is None else round(answer.error_percent, 1),
            round(answer.factor, 2),
        )
        for answer in answers
    ]


def _learned_from(device: Device, devices_: Sequence[Device]) -> str:
    """Whose predictors answer for a device: its own, or those of its kin, and in what they are kin."""
    ids = [device_.id for device_ in devices_ if device_.id in (device.id, device.variant_of)]
    if ids:
        return "itself" if device.id in ids else device.variant_of
    tier, heard = voices(device, devices_, "bf16")
    if tier == "vendor" and heard:
        return f"all of {device.vendor}"
    return f"{', '.join(sorted(heard))} (same {tier})" if heard else ""


def _rate(rates: Mapping[str, float]) -> object:
    return next((round(rates[name], 3) for name in ("bf16", "fp16", "fp32") if name in rates), "")


def clusters(config: Mapping[str, Any]) -> Rows:
    """Shipped clusters: their nodes, and what joins them."""
    all_clusters = [load_cluster(name) for name in known_clusters()]
    heads = ("id", "name", "device", "devices a node", "link", "fabric", "NICs a node", "GB/s a NIC", "shape")
    return heads, [
        (
            c.id,
            c.name,
            c.device,
            c.devices_per_node,
            c.link,
            c.fabric,
            c.nics_per_node,
            c.nic_gbps,
            c.topology.get("shape", ""),
        )
        for c in all_clusters
    ]


def models(config: Mapping[str, Any]) -> Rows:
    """Shipped models and where their shape was published."""
    return ("id", "source"), list(known_models().items())


def ops(config: Mapping[str, Any]) -> Rows:
    """Op kinds with their dims."""
    markup = re.compile(r":\w+:|`")  # what Sphinx would read in a docstring
    rows = ((kind.name, kind.family, " ".join(kind.names), kind.doc.splitlines()[0]) for kind in KINDS.values())
    return ("kind", "family", "dims", "is"), [(*row, markup.sub("", help_text)) for *row, help_text in rows]


def stacks(config: Mapping[str, Any]) -> Rows:
    """Frameworks whose ways of running a step are known."""
    return ("id", "name"), [(known_stack, load_stack(known_stack).name) for known_stack in known_stacks()]


def figures(config: Mapping[str, Any]) -> Rows:
    """The numbers that frameworks, serving engines, their hosts and networks have, and where each is from."""
    from ..simulator.serving.engines import engine_figures, known_serving_engines, load_serving_engine
    from ..simulator.serving.host import fitted_hosts

    rows: list[tuple[object, ...]] = []
    for one in map(load_stack, known_stacks()):
        for name, value in one.figures.items():
            parts = value.items() if isinstance(value, Mapping) else [("", value)]
            text = " ".join(f"{label}={number:g}".removeprefix("=") for label, number in parts)
            rows.append((one.id, name, text, one.sources[name].basis, str(one.sources[name])))
    for engine in map(load_serving_engine, known_serving_engines()):
        for name, value, source in engine_figures(engine):
            rows.append((f"serving engine {engine.id}", name, value, source.basis, str(source)))
    hosts = fitted_hosts()
    for name, host in hosts.engines.items():
        for figure, us in host.value.items():
            rows.append((f"serving host {name}", figure, f"{us:g}", hosts.source.basis, str(hosts.source)))
    for name, tuning in {**TUNINGS, **PCIE_TUNINGS}.items():
        for figure, value in vars(tuning).items():
            rows.append((f"nccl on {name}", figure, f"{value:g}", TUNINGS_SOURCE.basis, str(TUNINGS_SOURCE)))
    return ("stack", "setting", "value", "from", "evidence"), rows


def precisions(config: Mapping[str, Any]) -> Rows:
    """Formats of a step: what computes, and what linear layers are quantized to."""
    from ..datasets.precisions import known_precisions, precision_of

    return ("id", "dtype", "quantization"), [(name, *precision_of(name)) for name in known_precisions()]


def predictors(config: Mapping[str, Any]) -> Rows:
    """Registered predictors: the user's, then the shipped ones."""
    heads = ("device", "kind", "backend", "version", "current", "rows", "median APE %", "folder")
    rows: list[tuple[object, ...]] = []
    for path in resolve.registries(config):
        for entry in Registry(path).list() if path.is_dir() else []:
            card = entry.card
            error = card.get("test_median_ape")
            identity = (entry.device_id, entry.kind, entry.backend, entry.version, entry.current)
            rows.append((*identity, card.get("n"), None if error is None else round(error, 2), str(entry.path)))
    return heads, rows
