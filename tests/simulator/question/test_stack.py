"""Descriptions of frameworks: what a file inherits, that none says twice what another says, where figures are from."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import pytest

from opcast.datasets.figure_sources import FigureSource, FigureSourceError
from opcast.datasets.reading import read_yaml
from opcast.datasets.truth.published import CHECKOUT
from opcast.jobs import listing, resolve
from opcast.simulator.question.errors import PlanError
from opcast.simulator.question.requests import SimulateRequest
from opcast.simulator.question.stack import (
    EVERY_TABLE,
    STACK_DIRECTORY,
    Stack,
    known_stacks,
    load_stack,
    stack_from_dict,
    without_figures_of,
)
from opcast.simulator.question.work import Work

CONF = STACK_DIRECTORY.parent
NAMES = ("id", "name", "like", "family", "sources")
HEIRS = [name for name in known_stacks() if "like" in read_yaml(STACK_DIRECTORY / f"{name}.yaml", ValueError)]


def written(name: str) -> dict[str, Any]:
    """What the file itself says."""
    found: dict[str, Any] = read_yaml(STACK_DIRECTORY / f"{name}.yaml", ValueError)
    return found


def settings(stack: Stack) -> dict[str, Any]:
    """All that a step is simulated by."""
    return {each.name: getattr(stack, each.name) for each in fields(Stack) if each.name not in NAMES}


def test_mappings_are_merged_lists_replaced_and_null_is_the_usual() -> None:
    parent = load_stack("megatron")
    heir = stack_from_dict(
        {"id": "mine", "like": "megatron", "issue_us": {"gemm": 7}, "overlap": ["dp"], "bucket_mib": None}
    )
    assert heir.issue_us == {**parent.issue_us, "gemm": 7.0}
    assert (heir.overlap, heir.bucket_mib) == (("dp",), Stack().bucket_mib)
    assert (heir.fusion, heir.moment_dtype) == (parent.fusion, parent.moment_dtype)
    assert "bucket_mib" in parent.sources
    assert "bucket_mib" not in heir.sources
    assert heir.sources["overlap"] == parent.sources["overlap"]
    assert stack_from_dict({"like": "megatron", "issue_us": None}).issue_us == {}


def test_known_runs_speak_for_the_heir_unless_it_has_a_family_of_its_own() -> None:
    assert load_stack("torchtitan_2024").framework == "torchtitan"  # by way of two others
    assert load_stack("tensorflow").framework == "tensorflow"
    assert stack_from_dict({"id": "mine", "like": "megatron"}).framework == "megatron"
    assert stack_from_dict({"id": "mine"}).framework == "mine"


def test_every_framework_of_calibrations_and_memory_errors_is_still_one() -> None:
    effects = json.loads((CONF / "calibration.json").read_text())["effects"]
    levels = (level.split() for level in {each["of"] for each in effects})
    named = {part.removeprefix("framework=") for level in levels for part in level if part.startswith("framework=")}
    assert len(named) > 15
    assert named <= {load_stack(each).framework for each in known_stacks()}
    assert set(read_yaml(CONF / "memory_errors.yaml", ValueError)["stacks"]) <= set(known_stacks())


def test_a_stack_that_is_like_nobody_is_refused_in_one_line() -> None:
    with pytest.raises(PlanError, match="unknown stack 'megatorn'; did you mean megatron") as refused:
        stack_from_dict({"id": "mine", "like": "megatorn"})
    assert "\n" not in str(refused.value)


def test_the_command_line_and_requests_inherit_too() -> None:
    """Hydra gives the file as it stands, with what was asked for beside it."""
    config = {"stack": written("nanotron_checked") | {"issue_us": {"gemm": 1}, "overlap": []}}
    chosen = resolve.stack(config, "train")
    assert chosen is not None
    usual = load_stack("nanotron_checked")
    assert chosen.issue_us == {**usual.issue_us, "gemm": 1.0}
    assert (chosen.check_us, chosen.send_us, chosen.overlap) == (usual.check_us, usual.send_us, ())
    given = {"model": "tiny_llama_100m", "work": Work("train"), "stack": {"id": "mine", "like": "vllm"}}
    assert SimulateRequest.from_dict(given).stack == stack_from_dict({"id": "mine", "like": "vllm"})


@pytest.mark.parametrize("name", HEIRS)
def test_a_file_says_only_what_differs_from_the_one_that_it_is_like(name: str) -> None:
    own, values = settings(load_stack(name)), written(name)
    other = settings(load_stack(values["like"]))
    assert [key for key in values if key not in NAMES and own[key] == other[key]] == []
    for key, value in values.items():
        if isinstance(value, Mapping) and key in other:
            assert [part for part, number in value.items() if other[key].get(part) == number] == []


def test_no_two_stacks_are_equal() -> None:
    stacks = {name: settings(load_stack(name)) for name in known_stacks()}
    assert [pair for pair in itertools.combinations(stacks, 2) if stacks[pair[0]] == stacks[pair[1]]] == []


@pytest.mark.parametrize("name", known_stacks())
def test_every_figure_has_a_source(name: str) -> None:
    stack = load_stack(name)
    figures = set(stack.figures) | {
        key for key, value in written(name).items() if type(value) in (int, float) or key in ("issue_us", "step_us")
    }
    assert {each for each in figures if written(name).get(each, 0) is not None} <= stack.sources.keys()
    assert all(len(getattr(source, kind)) > 10 for source in stack.sources.values() for kind in source.kinds)


def test_figures_that_were_read_off_name_a_table_that_is_scored() -> None:
    tables = set(json.loads((CHECKOUT.parent / "calibration_scores.json").read_text()))
    read = {source.table for each in known_stacks() for source in load_stack(each).sources.values() if source.table}
    assert read
    assert read <= tables


@pytest.mark.parametrize(
    ("given", "wrong"),
    [({}, "say documented, code"), ({"read_off": "a step"}, "needs the table"), ({"code": "x", "table": "y"}, "table")],
)
def test_a_source_without_a_basis_is_none(given: dict[str, str], wrong: str) -> None:
    with pytest.raises(FigureSourceError, match=wrong):
        FigureSource(**given)


def test_figures_can_be_listed_with_what_they_rest_on() -> None:
    heads, rows = listing.figures({})
    by = {(row[0], row[1]): dict(zip(heads, row, strict=True)) for row in rows}
    assert by["nanotron_checked", "check_us"]["value"] == "310"
    assert by["nanotron_checked", "check_us"]["from"] == "read off train_nanotron_h100"
    assert by["nanotron", "share_us"]["from"] == "code, measured elsewhere"
    assert "gemm=80" in str(by["megatron", "issue_us"]["value"])


def test_every_setting_says_what_it_means() -> None:
    for each in fields(Stack):
        assert len(each.metadata["help"]) > 5


def test_figures_read_off_a_table_can_be_left_out() -> None:
    stack = load_stack("nanotron_checked")
    without = without_figures_of(stack, ["train_nanotron_h100"])
    assert (without.check_us, without.send_us, without.ring_factor, without.step_us) == (0.0, 0.0, 1.0, {})
    assert without.issue_us == stack.issue_us  # read off another table
    assert without_figures_of(stack, EVERY_TABLE).issue_us == {}
    assert without_figures_of(stack, ["train_mlperf"]) is stack
