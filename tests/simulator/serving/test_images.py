"""Requests with images: who encodes them, when they arrive at a replica, what users wait for; laws."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opcast.simulator.question.canonical import RequestError
from opcast.simulator.question.image_requests import ImageRequests
from opcast.simulator.question.serving import IterationLaw, KvMemory, ServingRequest
from opcast.simulator.question.traffic import Lengths, RequestTraffic
from opcast.simulator.serving import serve as serving
from opcast.simulator.serving.images import costs_of, encoded_us
from opcast.simulator.serving.replica import by_hand

LAW = IterationLaw(base_us=1000.0, decode_us=5.0, prefill_token_us=10.0)
TRAFFIC = RequestTraffic(rate=20.0, requests=30, input=Lengths(mean=50), output=Lengths(mean=5))


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setattr(serving, "worth_compiling", lambda outputs: False)

    def play(traffic: RequestTraffic = TRAFFIC, **images: Any) -> Any:
        request = ServingRequest(law=LAW, kv=KvMemory(500, 16), traffic=traffic, images=ImageRequests(**images))
        replica = replace(by_hand(LAW, 500, 16, 0.0), encoder=costs_of(request.images, None))
        return serving.serve(request, replica, keeping=serving.Keeping(0, True))

    return play


def ttft_ms(result: Any) -> list[float]:
    return [float(row["first_token_us"] - row["arrival_us"]) / 1e3 for row in result.requests]


def test_without_images_nothing_changes(served: Callable[..., Any]) -> None:
    def figures(**images: Any) -> dict[str, Any]:
        return {**served(**images).report.to_dict(), "wall_time_s": 0}

    assert figures(share=0.0, gpus=2, encode_ms=50.0) == figures()


def test_one_request_waits_for_its_encoder_and_the_way(served: Callable[..., Any]) -> None:
    one = replace(TRAFFIC, requests=1)
    text_ms = served(replace(one, input=Lengths(mean=50 + 2 * 100))).report.ttft_ms.mean
    sized: dict[str, Any] = {"share": 1.0, "count": 2, "tokens": 100, "encode_ms": 30.0}
    assert served(one, **sized).report.ttft_ms.mean == pytest.approx(text_ms + 60)  # before its first iteration
    moved = {"gpus": 1, "embedding_bytes": 1e6, "gbps": 10.0, "us": 500.0}
    apart = served(one, **sized, **moved)
    assert apart.report.ttft_ms.mean == pytest.approx(text_ms + 60 + 0.5 + 20)  # 200 MB at 10 GB/s
    assert apart.report.devices == 2
    assert served(one, **sized, **moved | {"gpus": 2}).report.ttft_ms.mean == pytest.approx(text_ms + 30 + 0.5 + 20)


@settings(max_examples=25, deadline=None)
@given(
    gaps=st.lists(st.floats(0, 1e5), min_size=1, max_size=30),
    counts=st.lists(st.integers(0, 3), min_size=30, max_size=30),
    gpus=st.integers(1, 4),
)
def test_encoders_take_one_image_after_the_other(gaps: list[float], counts: list[int], gpus: int) -> None:
    arrival_us, images = np.cumsum(gaps), np.array(counts[: len(gaps)])
    done_us = encoded_us(arrival_us, images, gpus, 1000.0)
    with_some = images > 0
    assert (done_us[~with_some] == arrival_us[~with_some]).all()
    assert (done_us[with_some] >= arrival_us[with_some] + 1000.0 * np.ceil(images[with_some] / gpus) - 1e-6).all()
    assert done_us.max() <= arrival_us.max() + 1000.0 * images.sum() + 1e-6
    assert (encoded_us(arrival_us, images, gpus + 1, 1000.0) <= done_us + 1e-6).all()
    assert (encoded_us(arrival_us, images, gpus, 500.0) <= done_us + 1e-6).all()


def test_everybody_is_served_and_times_count_from_when_they_were_sent(served: Callable[..., Any]) -> None:
    result = served(share=0.5, tokens=64, encode_ms=40.0, gpus=1)
    assert result.report.completed == 30
    assert result.report.images["requests"] == np.count_nonzero(result.requests["input_tokens"] == 50 + 64)
    with_images = result.requests["input_tokens"] > 50
    assert np.array(ttft_ms(result))[with_images].min() >= 40
    assert np.array(ttft_ms(result))[~with_images].min() < 40
    free = served(share=0.5, tokens=64, encode_ms=0.0, gpus=1, us=0.0)
    together = served(share=0.5, tokens=64, encode_ms=0.0)
    assert ttft_ms(free) == pytest.approx(ttft_ms(together))


def test_encoders_apart_need_times_of_arrival() -> None:
    closed = RequestTraffic(arrival="closed", concurrency=4)
    with pytest.raises(RequestError, match=r"images\.gpus=2 needs requests"):
        ServingRequest(law=LAW, kv=KvMemory(9), traffic=closed, images=ImageRequests(0.5, gpus=2))
