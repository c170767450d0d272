"""opcast: how long will it take? For an operator, a training step, an inference step, on hardware you may not have yet.

``opcast.predict`` and ``opcast.simulate`` answer; ``opcast.make_op`` builds the op they are asked about.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Device", "Op", "Work", "__version__", "load_device", "make_op", "predict", "simulate", "simulate_file"]

if TYPE_CHECKING:
    from .datasets.devices import Device, load_device
    from .datasets.ops import Op, make_op
    from .jobs.api import predict, simulate, simulate_file
    from .simulator.question.work import Work

_HOMES = {
    "Device": ".datasets.devices",
    "load_device": ".datasets.devices",
    "Op": ".datasets.ops",
    "make_op": ".datasets.ops",
    "Work": ".simulator.question.work",
    "predict": ".jobs.api",
    "simulate": ".jobs.api",
    "simulate_file": ".jobs.api",
}


def __getattr__(name: str) -> Any:
    """Public names, imported when first used, so that ``import opcast`` costs nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name], __name__), name)
