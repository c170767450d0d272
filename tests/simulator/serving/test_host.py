"""The host's part of a first token: each part by itself, and the same for one question, whoever is asked."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from opcast.datasets.clusters import load_cluster
from opcast.datasets.truth import ServingRow
from opcast.datasets.truth.rows import Hardware, PublishedLayout
from opcast.simulator.question.plan import load_stack
from opcast.simulator.question.requests import SimulateRequest
from opcast.simulator.question.serving import IterationLaw, KvMemory, Scheduler, ServingRequest
from opcast.simulator.question.sources import Sources
from opcast.simulator.question.traffic import Lengths, RequestTraffic
from opcast.simulator.search.served import played as event_loop
from opcast.simulator.search.served import run
from opcast.simulator.search.served.estimate import LoadCurves, ServedWay, apart, together
from opcast.simulator.search.served.replicas import LayoutReplica
from opcast.simulator.search.served.request import ServedSearchRequest, ServedSpace
from opcast.simulator.serving.connect import replicas_of
from opcast.simulator.serving.engines import ServingEngineError, load_serving_engine
from opcast.simulator.serving.host import (
    FIGURES,
    FirstToken,
    FittedHost,
    FittedHosts,
    HostTime,
    fitted_hosts,
    host_time,
    layers_and_experts,
    serial_host,
)
from opcast.simulator.serving.replica import by_hand
from opcast.simulator.serving.serve import Keeping, serve
from opcast.simulator.validation.cases import ValidationSettings
from opcast.simulator.validation.serving import Replicas, played
from opcast.simulator.workbench import Workbench

FIRST = FirstToken(clients=4, prompt=100.0, layers=32, experts=30)
PROMPT, ANSWER, CLIENTS = 256, 8, 8


@pytest.mark.parametrize(
    ("figure", "part", "share_us"),
    [
        ("request_us", "request", 7.0),
        ("client_us", "clients", 4 * 7.0),
        ("prompt_us", "prompt", 100 * 7.0),
        ("layer_us", "layers", 32 * 7.0),
        ("experts_us", "experts", 30 * 7.0),
    ],
)
def test_each_figure_is_one_part_of_a_first_token(figure: str, part: str, share_us: float) -> None:
    host = HostTime(**{figure: 7.0})
    parts = host.first_token_parts(FIRST)
    assert {name for name, us in parts.items() if us} == {part}
    assert parts[part] == host.first_token_us(FIRST) == share_us


def test_the_parts_of_a_first_token_add_up() -> None:
    host = HostTime(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0)
    assert host.first_token_us(FIRST) == sum(host.first_token_parts(FIRST).values()) == 3 + 16 + 500 + 192 + 210
    assert host.iteration_us(100.0, 8) == 100 + 1 + 2 * 8
    streaming = replace(host, stream_us=20.0)
    assert streaming.iteration_us(100.0, 5) == 100 + 1 + 2 * 5  # beside the GPU
    assert streaming.iteration_us(100.0, 8) == 20 * 8


def test_no_more_clients_count_than_the_largest_known_run_had() -> None:
    hosts = FittedHosts({"sglang": FittedHost({"client_us": 10.0}, most_clients=256)})
    assert hosts.of("sglang").first_token_us(replace(FIRST, clients=256)) == 2560
    assert hosts.of("sglang").first_token_us(replace(FIRST, clients=9000)) == 2560
    assert FittedHosts({}).of("sglang").most_clients == math.inf
    assert all(each.most_clients > 0 for each in fitted_hosts().engines.values())


def test_a_figure_that_no_host_has_is_one_line() -> None:
    with pytest.raises(ServingEngineError, match="request_us"):
        FittedHost({"ttft_us": 1.0})
    assert set(fitted_hosts().engines["vllm"].value) == set(FIGURES)


@pytest.mark.parametrize("name", ["num_hidden_layers", "n_layer", "n_layers"])
def test_layers_by_any_of_their_names(name: str) -> None:
    assert layers_and_experts({name: 24}) == (24, 0)
    assert layers_and_experts({name: 24, "n_routed_experts": 8, "first_k_dense_replace": 3}) == (24, 21)


def test_replicas_share_the_clients_out_and_requests_at_a_rate_have_none() -> None:
    law = IterationLaw(base_us=100.0)
    replica = replace(by_hand(law, 900, 16, 0.0), host=HostTime(client_us=10.0))
    lengths = {"input": Lengths(mean=32), "output": Lengths(mean=4), "requests": 40}
    closed = RequestTraffic(arrival="closed", concurrency=12, **lengths)
    request = ServingRequest(law=law, kv=KvMemory(900), traffic=closed)
    assert serve(request, replica).host_us == 120
    assert serve(replace(request, replicas=3), replica).host_us == 40
    coming = replace(request, traffic=RequestTraffic(rate=100.0, **lengths))
    assert serve(coming, replica).host_us == 0
    assert serve(coming, replica, clients=5).host_us == 50


def test_a_server_to_clients_bounds_the_rate_and_no_single_iteration() -> None:
    law = IterationLaw(base_us=8000.0, prefill_token_us=50.0)
    replica = by_hand(law, 90_000, 16, 0.0)
    lengths = {"input": Lengths(mean=64), "output": Lengths(mean=2000), "requests": 256}
    traffic = RequestTraffic(arrival="closed", concurrency=256, **lengths)
    request = ServingRequest(law=law, kv=KvMemory(90_000), traffic=traffic, scheduler=Scheduler(max_seqs=256))

    def tpot_ms(stream_us: float) -> float:
        return serve(request, replace(replica, host=HostTime(stream_us=stream_us))).report.tpot_ms.mean

    assert tpot_ms(30.0) == tpot_ms(0.0)  # 7.7 ms, while the next iteration runs
    assert tpot_ms(50.0) == pytest.approx(256 * 50e-3, rel=0.02)
    # prompts that come now and then leave the server time to send what it is behind with
    lengths |= {"input": Lengths(mean=512), "output": Lengths("uniform", low=100, high=400), "requests": 1024}
    mixed = replace(request, traffic=RequestTraffic(arrival="closed", concurrency=256, **lengths))
    free, bound = (serve(mixed, replace(replica, host=HostTime(stream_us=us))).report for us in (0.0, 50.0))
    assert free.tpot_ms.mean > 256 * 50e-3
    assert bound.tpot_ms.mean < 1.1 * free.tpot_ms.mean


def test_clients_have_tokens_when_a_slow_server_has_sent_them() -> None:
    replica = replace(by_hand(IterationLaw(base_us=1000.0), 90_000, 16, 0.0), host=HostTime(stream_us=50.0))
    lengths = {"input": Lengths(mean=16), "output": Lengths(mean=40), "requests": 512}
    traffic = RequestTraffic(arrival="closed", concurrency=128, **lengths)
    request = ServingRequest(law=IterationLaw(base_us=1000.0), kv=KvMemory(90_000), traffic=traffic)
    served = serve(request, replica, keeping=Keeping(requests=True))
    ended, tokens = served.requests, np.arange(512) * 40 * 50.0
    # one server sends a token each 50 us: no client has its answer before those of all that ended before are sent
    finish_us = np.sort(ended["finish_us"])
    assert (finish_us + 128 * 50.0 >= tokens).all()
    assert served.report.duration_s >= finish_us[-1] / 1e6
    assert served.report.output_tokens_per_s == pytest.approx(1e6 / 50.0, rel=0.02)
    # and who waits for an answer sends the next request behind it
    assert (np.sort(ended["arrival_us"])[128:] >= finish_us[:384] - 1e-6).all()


@pytest.mark.parametrize(("gpu_us", "clients", "tokens"), [(1000.0, 64, 40), (1000.0, 32, 40), (4000.0, 64, 40)])
def test_one_law_says_how_far_a_server_is_behind(gpu_us: float, clients: int, tokens: int) -> None:
    law, host = IterationLaw(base_us=gpu_us), HostTime(stream_us=50.0)
    lengths = Lengths("uniform", low=tokens // 2, high=tokens * 3 // 2)
    traffic = RequestTraffic(
        arrival="closed", concurrency=clients, input=Lengths(mean=16), output=lengths, requests=clients * 24
    )
    replica = replace(by_hand(law, 90_000, 16, 0.0), host=host)
    report = serve(ServingRequest(law=law, kv=KvMemory(90_000), traffic=traffic), replica).report
    behind_us = host.behind_us(gpu_us, clients, tokens)
    assert report.tpot_ms.mean * 1e3 == pytest.approx(host.iteration_us(gpu_us, clients) - behind_us / tokens, rel=0.15)
    assert report.ttft_ms.mean * 1e3 == pytest.approx(behind_us + 2 * gpu_us, abs=0.2 * behind_us + gpu_us)


class Asked:
    """One question: so many clients with prompts of one length on one replica of a small model on one GPU."""

    def __init__(self, small_model: Callable[..., dict[str, Any]], home: str) -> None:
        self.bench = Workbench(Sources.at(home, order=("network", "analytical"), calibration="none"))
        self.model = small_model("deepseek_v3", 3)
        self.cluster = replace(load_cluster("dgx_h100"), devices_per_node=1)
        step = SimulateRequest(
            model=self.model, cluster=self.cluster, stack=load_stack("vllm"), sources=self.bench.sources
        )
        self.traffic = RequestTraffic(
            arrival="closed",
            concurrency=CLIENTS,
            requests=10 * CLIENTS,
            input=Lengths(mean=PROMPT),
            output=Lengths(mean=ANSWER),
        )
        self.serving = ServingRequest(step=step, traffic=self.traffic)
        space = ServedSpace(tp=(1,), batch=(CLIENTS,), max_tokens=(512,), pools=("together",), ep=(1,))
        self.search = ServedSearchRequest(
            step=replace(step, cluster=self.cluster), input_len=PROMPT, output_len=ANSWER, space=space
        )
        hardware = Hardware("H100", "h100_sxm", "dgx_h100", 1, cluster_figures={"devices_per_node": 1})
        self.row = ServingRow(
            id="one",
            hardware=hardware,
            measured={},
            model="small",
            config=self.model,
            framework="vllm",
            layout=PublishedLayout(dp=1),
            precision="bf16",
            concurrency=CLIENTS,
            input_len=PROMPT,
            output_len=ANSWER,
        )

    def searched(self) -> tuple[dict[str, Any], dict[Any, LayoutReplica]]:
        """The search's one point, and its replica."""
        made = run.set_up(self.search)
        (layout,) = made.layouts
        own = run.replica_or_why(made, layout, "vllm", self.bench)
        assert isinstance(own, LayoutReplica)
        row = run.row_of(layout, "vllm", CLIENTS, 512)
        return {**row, **run.figures_of(made, row, own, None)[0]}, {(layout, "vllm"): own}


@pytest.fixture(scope="module")
def asked(small_model: Callable[..., dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Asked:
    return Asked(small_model, str(tmp_path_factory.mktemp("host")))


def bare(own: LayoutReplica) -> LayoutReplica:
    """The same without a host."""
    return replace(own, served=replace(own.served, host=HostTime()))


def without_first_tokens(own: LayoutReplica) -> LayoutReplica:
    """The same without the host of a first token."""
    nothing = dict.fromkeys(FIGURES[2:], 0.0)
    return replace(own, served=replace(own.served, host=replace(own.served.host, **nothing)))


def host_of(asked: Asked) -> float:
    """Microseconds that the host must add to a first token of the question."""
    host = fitted_hosts().of("vllm")
    us = host.first_token_us(FirstToken(CLIENTS, PROMPT, *layers_and_experts(asked.model)))
    assert us > host.client_us * CLIENTS + host.prompt_us * PROMPT + host.layer_us * 3
    return us


def test_a_search_and_its_confirmation_have_the_whole_host(asked: Asked) -> None:
    row, replicas = asked.searched()
    ((place, own),) = replicas.items()
    curves = LoadCurves(asked.search, (CLIENTS,))
    ways = [ServedWay(curves, replica, "vllm", 512) for replica in (own, without_first_tokens(own))]
    estimate = [together(way, CLIENTS)["ttft_ms"] for way in ways]
    assert estimate[0] - estimate[1] == pytest.approx(host_of(asked) * 1e-3)
    confirmed = [
        event_loop.confirmed(asked.search, row, {place: each})["ttft_ms"] for each in (own, without_first_tokens(own))
    ]
    assert confirmed[0] - confirmed[1] == pytest.approx(host_of(asked) * 1e-3)


@pytest.mark.slow
def test_serving_and_validation_have_the_host_of_a_search(asked: Asked) -> None:
    replica, _ = replicas_of(asked.serving, asked.bench)
    assert serve(asked.serving, replica).host_us == pytest.approx(host_of(asked))
    settings = ValidationSettings(lambda device, cluster: asked.bench.engine(device, cluster))
    known = Replicas(settings, lambda device, cluster: asked.bench.engine(device, cluster))
    times = [played(asked.row, known, hosts).ttft_ms.mean for hosts in (None, FittedHosts({}))]
    assert times[0] - times[1] == pytest.approx(host_of(asked) * 1e-3)
    assert known.of(asked.row).limits == replica.limits


def test_pools_apart_have_the_clients_under_way(asked: Asked) -> None:
    _, replicas = asked.searched()
    ((_, own),) = replicas.items()
    request = replace(asked.search, space=replace(asked.search.space, ratio=("1:1",)))
    host = HostTime(client_us=5.0, prompt_us=3.0)
    with_host = replace(own, served=replace(own.served, host=host))
    ((one,),), ((other,),) = (
        apart(ServedWay(LoadCurves(request, (CLIENTS,)), each, "vllm", 512, each), (CLIENTS,), (2, 2, 2))
        for each in (with_host, bare(own))
    )
    under_way = one["requests_per_s"] * 1e-3 * (one["ttft_ms"] + one["tpot_ms"] * (ANSWER - 1))
    assert under_way > 0.5
    assert one["ttft_ms"] - other["ttft_ms"] == pytest.approx(0.005 * under_way + 0.003 * PROMPT)
    assert np.isclose(one["requests_per_s"], other["requests_per_s"])


def test_what_a_serial_engine_adds_to_an_iteration_goes_by_its_version() -> None:
    rule = load_serving_engine("vllm").host
    old, middle, newest, unnamed = (
        host_time("vllm serial", rule, FittedHosts({}), version).iteration_us(5000.0, 32)
        for version in ("0.5.3", "0.6.3", "0.12.0", "")
    )
    assert old > middle > newest == unnamed > 6000.0
    assert host_time("vllm", rule, FittedHosts({}), "0.18.0").iteration_us(5000.0, 32) == 5000.0
    assert serial_host(load_serving_engine("sglang").host, "0.3") is None
