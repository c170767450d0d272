"""Hosts of serving engines, fitted: known ones are found again, and what was left out is answered by others."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from opcast.simulator.serving.engines import SerialHost
from opcast.simulator.serving.host import FittedHosts, HostTime, fitted_hosts
from opcast.tests.evidence.hosts import (
    FIGURES,
    HIDDEN,
    QUANTITIES,
    ServedRun,
    as_values,
    fitted,
    folds,
    host_fit,
    left_out,
    read_runs,
    ways,
    write_runs,
)

TRUE = {
    "vllm serial": HostTime(0.0, 0.0, 30e3, 200.0, 1.0, overlapped=False),
    "trtllm": HostTime(0.0, 0.0, 60e3, 900.0, 3.0),
}


def runs(noise: float = 0.01) -> list[ServedRun]:
    random = np.random.default_rng(0)
    made = []
    for engine, host in TRUE.items():
        for model in range(8):
            for clients in (4, 16, 64):
                for prompt in (900.0, 7400.0):
                    base = {"tpot": 4.0 + model + 0.05 * clients, "ttft": 20.0 + 0.02 * prompt}
                    run = ServedRun(
                        *(
                            f"{engine} {model} {clients} {prompt}",
                            engine,
                            engine,
                            f"chip {model % 4}",
                            f"model {model}",
                        ),
                        *(clients, clients * 0.95, prompt, 920.0, base, {}),
                        serial=SerialHost() if host.overlapped else SerialHost(400.0, 20.0),
                    )
                    exact = run.under(host)
                    off = np.exp(random.normal(0, noise, 2))
                    measured = {"tpot": exact["tpot"] * off[0], "ttft": exact["ttft"] * off[1]}
                    made.append(replace(run, measured=measured))
    return made


@pytest.fixture(scope="module")
def fit() -> object:
    return host_fit(runs())


def test_known_hosts_are_found_again_with_their_errors() -> None:
    found = fitted(runs(0.002))
    for engine, host in TRUE.items():
        own = found.engines[engine]
        assert own.value["request_us"] == pytest.approx(host.request_us, abs=4 * own.error["request_us"])
        assert own.rows == 48
        assert own.groups == 8
        assert all((own.error[name] > 0) == (name not in HIDDEN) for name in FIGURES)
    for run in runs():
        answered = run.under(found.of(run.engine))
        assert answered["tpot"] == pytest.approx(run.under(TRUE[run.engine])["tpot"], rel=0.02)
        assert answered["ttft"] == pytest.approx(run.under(TRUE[run.engine])["ttft"], rel=0.1)


def test_a_host_never_takes_less_than_no_time() -> None:
    slow = [replace(run, measured={name: 0.5 * value for name, value in run.predicted.items()}) for run in runs()]
    for each in fitted(slow).engines.values():
        assert all(value >= 0 for value in each.value.values())
        assert each.value["step_us"] < 50


def test_what_is_fitted_adds_nothing_to_iterations(fit) -> None:
    slower = [
        replace(run, measured={"tpot": 1.2 * run.measured["tpot"], "ttft": run.measured["ttft"]}) for run in runs()
    ]
    for found in (fit.hosts, fitted(slower)):
        assert all(each.value[name] == 0 for each in found.engines.values() for name in HIDDEN)
        assert found.of("an engine that nobody ran").iteration_us(1000.0, 4) == 1000.0


def test_who_is_left_out_is_answered_by_the_others(fit) -> None:
    errors = left_out(runs(), lambda run: run.backend)
    assert errors.keys() == {run.id for run in runs()}
    without = fitted([run for run in runs() if run.backend != "vllm serial"])
    run = next(run for run in runs() if run.backend == "vllm serial")
    assert errors[run.id]["tpot"] == pytest.approx(
        np.log(run.measured["tpot"] / run.under(without.of("vllm serial"))["tpot"])
    )
    assert fit.scores()["all"]["backend"]["ttft"]["median"] > fit.scores()["all"]["groups"]["ttft"]["median"]


def test_groups_are_whole_on_one_side_and_scores_have_all_ways(fit) -> None:
    assert sorted(folds(runs()).values()) == [0, 0, 1, 1, 2, 2, 3, 3]
    scores = fit.scores()
    assert scores["all"]["fitted"]["tpot"]["median"] < 2
    assert scores["all"]["none"]["ttft"]["median"] > 2
    for quantity in QUANTITIES:
        assert scores["all"]["groups"][quantity]["rows"] == len(runs())
        assert all(0.5 <= scores["all"][how][quantity]["coverage"] <= 1 for how in ways(runs()))
    assert set(scores["all"]) == {"none", "fitted", *ways(runs())}


def test_the_file_says_what_was_fitted(fit, tmp_path) -> None:
    path = tmp_path / "hosts.json"
    path.write_text(json.dumps(as_values(fit.hosts)))
    again = fitted_hosts(path)
    assert isinstance(again, FittedHosts)
    assert again.of("vllm serial") == fit.hosts.of("vllm serial")
    seen = runs()[0].named
    assert again.unknown(seen) == []
    assert again.unknown(seen | {"model": "another"}) == ["model"]
    less = (seen, seen | {"model": "another"}, seen | {"model": "another", "system": "new"}, {})
    widths = [again.width(named, "ttft") for named in less]
    assert widths == sorted(widths)  # what less is known of is no narrower
    assert widths[-1] == again.widths["3"]["ttft"]  # a version is not named
    assert again.source.table == "serving_silicon"
    assert FittedHosts({}).width(seen, "tpot") is None


def test_predictions_are_kept_without_what_was_measured(tmp_path) -> None:
    predicted = {run.id: dict(run.predicted) for run in runs()}
    write_runs(tmp_path / "runs.parquet", predicted)
    assert read_runs(tmp_path / "runs.parquet") == predicted
