"""Vidur's answers on one workload, whose iterations take as long as a formula says (the reference data's ``vidur``)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from opcast.simulator.question.serving import IterationLaw, KvMemory, Scheduler, ServingRequest
from opcast.simulator.question.traffic import RequestTraffic

# Vidur counts a decoding request's newest token among its context.
LAW = IterationLaw(base_us=5000.0, decode_us=20.02, decode_context_us=0.02, prefill_token_us=60.0)
RUNS = {  # policy, KV blocks, replicas; Vidur's global scheduler `lor` looks at queues alone
    "vllm_1replica": ("vllm_v0", 4000, 1),
    "vllm_1replica_tight": ("vllm_v0", 450, 1),
    "sarathi_1replica": ("sarathi", 4000, 1),
    "vllm_4replicas_lor": ("vllm_v0", 4000, 4),
}
FIRST = 500  # requests of the fast case


def answered(
    name: str, folder: Path, played: Callable[..., Any], trace: Path, count: int
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """opcast's and Vidur's times of the first requests, in seconds."""
    policy, blocks, replicas = RUNS[name]
    pd.read_csv(folder / "trace.csv").head(count).to_csv(trace, index=False)
    scheduler = Scheduler(policy, max_tokens=4096, max_seqs=128, padded=True, watermark=0.01)
    request = ServingRequest(
        law=LAW,
        kv=KvMemory(blocks, 16),
        scheduler=scheduler,
        replicas=replicas,
        router="least_waiting",
        traffic=RequestTraffic(trace=str(trace)),
    )
    rows = played(request).requests
    first_us = pd.read_csv(folder / "trace.csv").arrived_at[0] * 1e6
    ours = pd.DataFrame({name: rows[name] for name in ("preemptions", "output_tokens")})
    ours["arrival"] = (rows["arrival_us"] + first_us) / 1e6
    for name_, end in (("e2e", "finish_us"), ("ttft", "first_token_us"), ("delay", "admitted_us")):
        ours[name_] = (rows[end] - rows["arrival_us"]) / 1e6
    theirs = pd.read_csv(folder / f"{name}.request_metrics.csv").sort_values("Request Id").head(count)
    return ours, theirs.reset_index(drop=True)


def compared(ours: pd.DataFrame, theirs: pd.DataFrame) -> None:
    """Every request has the same times to a nanosecond and the same preemptions, so that batches were the same."""
    columns = {"e2e": "request_e2e_time", "ttft": "prefill_e2e_time", "delay": "request_scheduling_delay"}
    for own, other in columns.items():
        np.testing.assert_allclose(ours[own], theirs[other], rtol=0, atol=1e-9, err_msg=own)
    assert list(ours.preemptions) == list(theirs.request_num_restarts)


@pytest.mark.reference
@pytest.mark.parametrize("name", list(RUNS))
def test_first_requests_end_when_vidur_says(
    name: str, reference_data: Path, played: Callable[..., Any], tmp_path: Path
) -> None:
    folder = reference_data / "truth" / "vidur"
    ours, theirs = answered(name, folder, played, tmp_path / "trace.csv", FIRST)
    last = pd.read_csv(folder / "trace.csv").arrived_at[FIRST]
    before = ours.arrival + ours.e2e < last  # what comes later cannot have changed these
    assert before.sum() > 0.9 * FIRST
    compared(ours[before], theirs[before])


@pytest.mark.slow
@pytest.mark.reference
@pytest.mark.parametrize("name", list(RUNS))
def test_all_requests_end_when_vidur_says(
    name: str, reference_data: Path, played: Callable[..., Any], tmp_path: Path
) -> None:
    ours, theirs = answered(name, reference_data / "truth" / "vidur", played, tmp_path / "trace.csv", 2000)
    compared(ours, theirs)
    if "tight" in name:
        assert ours.preemptions.sum() == 108


@pytest.mark.parametrize(("padded", "finish_us"), [(False, 4700.0), (None, 5400.0)])
def test_faster_transformer_counts_what_is_there_as_vidur_does(
    played: Callable[..., Any], tmp_path: Path, padded: bool | None, finish_us: float
) -> None:
    """Prompts of 100 and 50 tokens, answers of 3 and 1: 1 ms an iteration, 10 us a prompt token, 100 us a decode;
    padded to two prompts of 100 and to two decodes."""
    path = tmp_path / "two.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n0,100,3\n0,50,1\n")
    request = ServingRequest(
        law=IterationLaw(base_us=1000.0, prefill_token_us=10.0, decode_us=100.0),
        kv=KvMemory(100, 16),
        scheduler=Scheduler("faster_transformer", padded=padded),
        traffic=RequestTraffic(trace=str(path)),
    )
    assert played(request).requests["finish_us"].max() == pytest.approx(finish_us)
