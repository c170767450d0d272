"""Which backends answer for a device: those with a predictor or a measurement of any kind of op."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...datasets.backends import framework, version
from ...datasets.devices import Device
from ...datasets.near import did_you_mean
from ...datasets.ops import KINDS
from ...datasets.store import Store
from ...models.kinship import is_kin
from ...models.predictor import ANY
from ...models.registry import Registry
from .fused import EngineError


def known_backends(device: Device, stores: Sequence[Path], registries: Sequence[Path]) -> set[str]:
    """Whole names of backends, those of kin among them. Predictors over devices count for GPUs alone."""
    backends = set()
    for registry in (Registry(path) for path in registries):
        kin_ids = [name for name in registry.devices() if is_kin(device, name)]
        device_ids = [name for name in (device.id, device.variant_of, "" if device.synchronous else ANY) if name]
        backends |= {
            backend
            for device_id in {*device_ids, *kin_ids}
            for kind in KINDS
            for backend in registry.backends(kind, device_id)
        }
    for store in (Store(path) for path in stores if path.is_dir()):
        for kind in store.kinds():
            if device.id in store.devices(kind):
                backends.update(store.read(kind, device.id, columns=["backend"])["backend"].unique().to_pylist())
    return backends


def check_backend(backend: Any, device: Device, stores: Sequence[Path], registries: Sequence[Path]) -> str | None:
    """A backend (``vllm-0.24.0:…``), version (``vllm-0.24.0``) or framework (``vllm``) as given, None for any.

    EngineError where nothing is known of it on the device; the message names the nearest known.
    """
    if backend is None:
        return None
    backends = known_backends(device, stores, registries)
    versions, frameworks = {version(name) for name in backends}, {framework(name) for name in backends}
    if backend in [*frameworks, *versions, *backends]:
        return str(backend)
    choices = f"known: {', '.join(sorted(frameworks)) or 'none'}"
    hint = did_you_mean(backend, [*sorted(frameworks), *sorted(versions), *sorted(backends)], choices)
    raise EngineError(f"backend={backend} has no predictor or measurement for {device.id}; {hint} (null takes any)")
