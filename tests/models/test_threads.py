"""Training asks BLAS for one thread, whatever the machine has."""

from __future__ import annotations

from typing import Any

import pytest
import scipy.linalg  # noqa: F401 - its BLAS is one of those that are asked
from threadpoolctl import threadpool_info, threadpool_limits

from opcast.models import training
from opcast.models.candidates import Options
from opcast.models.learning import learn
from opcast.models.training import MeasurementTable, fit


def threads() -> set[int]:
    return {int(each["num_threads"]) for each in threadpool_info() if each["user_api"] == "blas"}


def test_a_table_is_learned_on_one_thread(
    measurements: MeasurementTable, fast: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[set[int]] = []

    def watched(*arguments: Any) -> Any:
        seen.append(threads())
        return learn(*arguments)

    monkeypatch.setattr(training, "learn", watched)
    with threadpool_limits(2, user_api="blas"):
        fit(measurements, fast)
        assert threads() == {2}
    assert seen == [{1}]
