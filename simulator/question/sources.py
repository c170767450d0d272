"""Where answers come from: measurements, predictors, traced graphs, and which engine is asked first."""

from __future__ import annotations

from dataclasses import dataclass

from .declaration import setting

ORDER = ("measured", "learned", "transfer", "network", "analytical")
HOME = "~/.opcast"


@dataclass(frozen=True)
class Sources:
    """Folders of the user's measurements, predictors and graphs; engines in order; the backend preferred.

    ``calibration`` is what known runs say of the times of steps: ``shipped``, ``none`` or a file of the user's own.
    """

    store: str = setting(f"{HOME}/store", hidden=True)
    predictors: str = setting(f"{HOME}/predictors", hidden=True)
    graphs: str = setting(f"{HOME}/graphs", hidden=True)
    order: tuple[str, ...] = setting(ORDER, "engines in the order they are asked", name="engines", path="engine.order")
    backend: str | None = setting(
        None, "a backend or its framework (torch, vllm, nccl, triton:rms_norm …); null: the device's usual one"
    )
    calibration: str = setting(
        "shipped", "effects of known steps: own (of `opcast trace calibrate`, else shipped) | shipped | none | a file"
    )

    @classmethod
    def at(
        cls, home: str, order: tuple[str, ...] = ORDER, backend: str | None = None, calibration: str = "shipped"
    ) -> Sources:
        """The folders below one home."""
        return cls(f"{home}/store", f"{home}/predictors", f"{home}/graphs", order, backend, calibration)
