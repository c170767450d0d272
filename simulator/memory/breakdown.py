"""How much memory of a device is spent on what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

GIB = 2**30


@dataclass(frozen=True)
class Memory:
    """Peak memory of one device by what it is spent on, in GiB; ``peak_gib`` is the sum at the peak's moment.

    ``allocated_gib`` is what a framework's allocator has handed out then, ``reserved_gib`` what it holds of the device;
    ``where`` the node that runs at the peak, ``by_class`` a finer split, ``advice`` what to shrink where it does not
    fit.
    """

    peak_gib: float
    weights_gib: float
    gradients_gib: float
    optimizer_gib: float
    activations_gib: float
    other_gib: float
    allocated_gib: float = 0.0
    reserved_gib: float = 0.0
    where: str = ""
    by_class: Mapping[str, float] = field(default_factory=dict)
    advice: str = ""

    @property
    def parts_gib(self) -> dict[str, float]:
        """GiB by what they are spent on, which add up to the peak."""
        names = ("weights", "gradients", "optimizer", "activations", "other")
        return {name: getattr(self, f"{name}_gib") for name in names}
