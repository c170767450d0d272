"""Priorities and classes of requests, and who may come in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from opcast.simulator.question.canonical import RequestError
from opcast.simulator.question.request_classes import Admission, RequestClass
from opcast.simulator.question.serving import (
    POLICIES,
    IterationLaw,
    KvMemory,
    Scheduler,
    ServingRequest,
    ServingTargets,
)
from opcast.simulator.question.traffic import Lengths, RequestTraffic

from .played import played as schedule_of

LAW = IterationLaw(base_us=10_000.0)
CLASSES = (RequestClass("chat", 1, 0, ttft_ms=100), RequestClass("batch", 2, 5))
Play = Callable[..., Any]


def asked(**given: Any) -> ServingRequest:
    traffic = RequestTraffic(
        rate=60.0,
        requests=60,
        input=Lengths("uniform", low=1, high=100),
        output=Lengths("uniform", low=1, high=20),
        classes=CLASSES,
    )
    usual: dict[str, Any] = {
        "law": LAW,
        "kv": KvMemory(40, 16),
        "traffic": traffic,
        "scheduler": Scheduler(queue="priority", max_seqs=4),
    }
    return ServingRequest(**usual | given)


def test_the_lower_priority_number_starts_first() -> None:
    """One seat: the second runs before the first that waits, because its number is lower; of equal ones who came."""
    requests = [[0, 16, 5, 0, 0], [1, 16, 2, 0, 0], [2, 16, 2, 0, 0], [3, 16, 2, 0, 0]]
    mine = schedule_of(requests, False, "vllm", priorities=[0, 3, 1, 1], blocks=20, max_seqs=1, max_tokens=64)
    order = list(dict.fromkeys(name for each in mine["schedule"] for name in each))
    assert order == ["0", "2", "3", "1"]


def test_the_lowest_priority_gives_way_although_it_came_first() -> None:
    """Two requests of two blocks in three: at its 17th token the second needs a third one, and the first goes."""
    requests = [[0, 16, 30, 0, 0], [0, 16, 30, 0, 0]]
    by_priority = schedule_of(requests, False, "vllm", priorities=[1, 0], blocks=3, max_seqs=8, max_tokens=64)
    by_arrival = schedule_of(requests, False, "vllm", blocks=3, max_seqs=8, max_tokens=64)
    assert by_priority["preemptions"][0] > 0 == by_priority["preemptions"][1]
    assert by_arrival["preemptions"][1] > 0 == by_arrival["preemptions"][0]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    policy=st.sampled_from(POLICIES),
    seed=st.integers(0, 99),
    queue=st.integers(0, 6) | st.none(),
    caching=st.booleans(),
)
def test_everybody_is_served_or_rejected_and_classes_add_up(
    played: Play, policy: str, seed: int, queue: int | None, caching: bool
) -> None:
    request = asked(
        scheduler=Scheduler(policy, queue="priority", max_seqs=4, prefix_caching=caching),
        admission=Admission(max_queue=queue),
    )
    request = replace(request, traffic=replace(request.traffic, seed=seed))
    report = played(request).report
    assert report.completed + report.rejected == report.requests == 60
    assert sum(each["requests"] for each in report.classes.values()) == 60
    assert sum(each["completed"] for each in report.classes.values()) == report.completed
    assert sum(each["requests"] for each in report.rejections.values()) == report.rejected
    met = sum(each["slo_attainment"] * each["requests"] for each in report.classes.values())
    assert met == pytest.approx(report.slo_attainment * 60)


def test_priorities_make_the_first_class_faster_and_nobody_more(played: Play) -> None:
    by_priority = played(asked()).report
    by_arrival = played(asked(scheduler=Scheduler(max_seqs=4))).report
    waits = {
        name: [report.classes[name]["ttft_ms"]["mean"] for report in (by_priority, by_arrival)]
        for name in ("chat", "batch")
    }
    assert waits["chat"][0] < 0.5 * waits["chat"][1]
    assert waits["batch"][0] > waits["batch"][1]
    assert by_priority.classes["chat"]["slo_attainment"] > by_arrival.classes["chat"]["slo_attainment"]
    assert by_priority.completed == by_arrival.completed == 60


def at_once(count: int, **given: Any) -> ServingRequest:
    """So many requests at the same moment, each one iteration of ten milliseconds."""
    traffic = RequestTraffic(
        arrival="bursty", burst=count, requests=count, input=Lengths(mean=16), output=Lengths(mean=1)
    )
    return ServingRequest(law=LAW, kv=KvMemory(100, 16), traffic=traffic, **given)


@pytest.mark.parametrize(
    ("admission", "limit", "served"),
    [
        (Admission(max_requests=3), "max_requests", 3),  # all that have not ended count
        (Admission(max_prompt_tokens=40), "max_prompt_tokens", 3),  # 48 tokens are the first sum of at least 40
        (Admission(max_queue=4), "max_queue", 4),  # an idle engine looks once all have come
        (Admission(rate=1.0, burst=5), "rate", 5),
    ],
)
def test_each_limit_rejects_by_its_own_count(played: Play, admission: Admission, limit: str, served: int) -> None:
    result = played(at_once(10, admission=admission))
    assert result.report.completed == served
    assert result.report.rejections[limit]["requests"] == 10 - served
    assert f"admission.{limit}" in result.report.notes[-1]
    assert result.requests["rank"].tolist() == [0] * served + [-1] * (10 - served)


def test_a_gateway_lets_in_its_rate(played: Play) -> None:
    one = {"input": Lengths(mean=16), "output": Lengths(mean=1)}
    traffic = RequestTraffic(arrival="constant", rate=100.0, requests=200, **one)
    report = played(
        ServingRequest(law=LAW, kv=KvMemory(100, 16), traffic=traffic, admission=Admission(rate=25.0))
    ).report
    assert report.completed == pytest.approx(50, abs=1)


def test_a_full_queue_makes_room_for_a_higher_priority(played: Play) -> None:
    """As SGLang: the last of the queue goes where who comes is of a higher priority, else who comes."""
    request = asked(
        admission=Admission(max_queue=3), traffic=replace(asked().traffic, rate=1000.0), scheduler=Scheduler(max_seqs=1)
    )
    by_arrival = played(request).report
    by_priority = played(replace(request, scheduler=Scheduler(max_seqs=1, queue="priority"))).report
    chat = [report.rejections["max_queue"]["classes"]["chat"] for report in (by_priority, by_arrival)]
    assert chat[0] < chat[1]
    assert by_priority.rejected == by_arrival.rejected


def test_sessions_stay_in_their_class(played: Play) -> None:
    traffic = replace(asked().traffic, turns=3, requests=90, rate=20.0)
    result = played(asked(traffic=traffic, kv=KvMemory(400, 16)))
    kinds = result.requests["kind"]
    assert set(kinds) == {0, 1}
    assert 0.15 < np.mean(kinds == 0) < 0.55
    assert sum(each["requests"] for each in result.report.classes.values()) == 90


def test_a_trace_names_classes(played: Play, tmp_path: Any) -> None:
    path = tmp_path / "requests.csv"
    rows = ["arrival_s,input_tokens,output_tokens,class", "0,16,2,batch", "0,16,2,chat", "0.5,16,2,batch"]
    path.write_text("\n".join(rows))
    traffic = RequestTraffic(trace=str(path), classes=CLASSES)
    report = played(asked(traffic=traffic)).report
    assert {name: each["requests"] for name, each in report.classes.items()} == {"chat": 1, "batch": 2}
    path.write_text("\n".join([*rows, "1,16,2,bulk"]))
    with pytest.raises(ValueError, match=r"row 4: class=bulk is none of traffic.classes: chat, batch"):
        played(asked(traffic=traffic))


@pytest.mark.parametrize(
    ("classes", "words"),
    [
        ([{"name": "a"}, {"name": "a"}], "twice"),
        ([{"name": "a", "share": 0}], "every share is 0"),
        ([{"name": ""}], "needs a name"),
        ([{"name": "a", "priority": 1.5}], "priority"),
        ([{"name": "a", "priority": 10**30}], "must be from -1,000,000,000 to 1,000,000,000"),
        ({"name": "a"}, "must be a list"),
    ],
)
def test_classes_that_cannot_be(classes: Any, words: str) -> None:
    values = asked().to_dict()
    with pytest.raises(RequestError, match=words):
        ServingRequest.from_dict({**values, "traffic": {"classes": classes}})


def test_targets_of_a_class_go_before_those_of_all(played: Play) -> None:
    report = played(asked(slo=ServingTargets(ttft_ms=1e6))).report
    assert report.classes["chat"]["slo"] == {"ttft_ms": 100.0}
    assert report.classes["batch"]["slo"] == {"ttft_ms": 1e6}
    assert report.classes["batch"]["slo_attainment"] == 1.0
    assert report.classes["chat"]["slo_attainment"] < 1.0
