"""How numbers of things are told: one of a thing is no plural, and what a fleet may have is not what it had."""

from __future__ import annotations

import pytest

from opcast.jobs.cli import main

LAW = ["law={base_us: 8000, decode_us: 20, prefill_token_us: 40}", "kv.blocks=2000"]
FEW = ["traffic.requests=40", "traffic.rate=10", "traffic.input.mean=200", "traffic.output.mean=20"]


def test_one_of_a_thing_is_no_plural(capsys: pytest.CaptureFixture[str]) -> None:
    """Nor has a fleet that an autoscaler keeps small as many replicas as it may have."""
    assert main(["serving", *LAW, *FEW]) == 0
    told = capsys.readouterr().out
    assert "1 replica\n" in told
    assert "(1 GPU)" in told
    few = ["autoscale.policy=queue", "autoscale.target=100", "autoscale.max_replicas=3", "cold_start.seconds=9"]
    assert main(["serving", *LAW, *FEW, *few]) == 0
    told = capsys.readouterr().out
    assert "at most 3 replicas" in told
    assert "1.00 replicas on average" in told


def test_images_are_told_apart_from_the_requests_that_have_them(capsys: pytest.CaptureFixture[str]) -> None:
    images = ["images.share=1", "images.count=2", "images.encode_ms=5", "images.gpus=1"]
    assert main(["serving", *LAW, "traffic.requests=3", "traffic.output.mean=4", *images]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "6 images in 3 requests, 5.0 ms each" in told
    assert "1 GPU to encode" in told


def test_few_tokens_a_second_are_not_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serving", *LAW, "traffic.requests=1", "traffic.output.mean=1", "traffic.rate=0.2"]) == 0
    assert " 0 output tokens/s" not in capsys.readouterr().out


def test_a_job_of_one_step_is_no_plural(capsys: pytest.CaptureFixture[str]) -> None:
    words = "cluster=dgx_h100 workload.global_batch=64 steps=1 step_time_s=2 checkpoint.size_gb=1 lives=20"
    assert main(["plan", "model=tiny_llama_100m", *words.split()]) == 0
    told = capsys.readouterr()
    assert "1 step of 2 s" in told.out + told.err
    assert "1 time, every" in told.out
