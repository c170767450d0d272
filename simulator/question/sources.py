"""Where answers come from: measurements, predictors, traced graphs, and which engine is asked first."""

from __future__ import annotations

from dataclasses import dataclass

ORDER = ("measured", "learned", "transfer", "network", "analytical")
HOME = "~/.opcast"


@dataclass(frozen=True)
class Sources:
    """Folders of the user's measurements, predictors and graphs; engines in order; the backend preferred.

    ``calibration`` is what known runs say of the times of steps: ``shipped``, ``none`` or a file of the user's own.
    """

    store: str = f"{HOME}/store"
    predictors: str = f"{HOME}/predictors"
    graphs: str = f"{HOME}/graphs"
    order: tuple[str, ...] = ORDER
    backend: str | None = None
    calibration: str = "shipped"

    @classmethod
    def at(
        cls, home: str, order: tuple[str, ...] = ORDER, backend: str | None = None, calibration: str = "shipped"
    ) -> Sources:
        """The folders below one home."""
        return cls(f"{home}/store", f"{home}/predictors", f"{home}/graphs", order, backend, calibration)
