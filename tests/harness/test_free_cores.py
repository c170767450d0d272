"""Cores that other work keeps busy are left out, and the process has all of them back afterwards."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opcast.harness.environment import core_ids
from opcast.harness.free_cores import free_cores, on_free_cores, processor_loads

PAIRS = [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_as_many_cores_are_left_out_as_the_load_fills_the_busiest_first() -> None:
    assert free_cores(PAIRS, {}) == [0, 1, 2, 3]
    assert free_cores(PAIRS, {1: 1.0}) == [0, 2, 3]
    assert free_cores(PAIRS, {5: 1.0}) == [0, 2, 3], "a busy sibling is a busy core"
    assert free_cores(PAIRS, {0: 0.55, 3: 0.45}) == [1, 2, 3], "one process that moves between two cores"
    assert free_cores(PAIRS, dict.fromkeys(range(8), 0.1)) == [0, 1, 2, 3], "a little everywhere"
    assert free_cores(PAIRS, dict.fromkeys(range(8), 1.0)) == [0], "one is always kept"
    assert free_cores([[2]], {2: 1.0}) == [2]


@given(st.dictionaries(st.integers(0, 7), st.floats(0.0, 1.0)))
def test_what_is_kept_is_never_busier_than_what_is_left_out(loads: dict[int, float]) -> None:
    kept = free_cores(PAIRS, loads)
    load = {core[0]: max(loads.get(each, 0.0) for each in core) for core in PAIRS}
    assert 1 <= len(kept) <= len(PAIRS)
    assert kept == sorted(kept)
    assert max(load[each] for each in kept) <= min((load[each] for each in set(load) - set(kept)), default=1.0)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds no process to a core")
def test_a_core_that_a_process_spins_on_is_left_out_for_as_long_as_the_work_takes() -> None:
    before, cores = os.sched_getaffinity(0), core_ids()
    if len(cores) < 2:
        pytest.skip("one core alone is always kept")
    spin = f"import os\nos.sched_setaffinity(0, [{cores[0]}])\nprint(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE) as spinning:
        assert spinning.stdout is not None
        spinning.stdout.readline()
        loads = processor_loads(0.3)
        left = free_cores([[each] for each in cores], loads)
        with on_free_cores() as (free, count):
            inside = os.sched_getaffinity(0)
        spinning.kill()
    assert loads[cores[0]] > 0.8
    assert cores[0] not in left or loads[cores[1]] >= loads[cores[0]], "other tests may keep the next one as busy"
    assert (len(inside), count) == (free, len(cores))
    assert free < count
    assert os.sched_getaffinity(0) == before
