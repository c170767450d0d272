"""Rules on published tables: conditions, filling and replacing, whose rows they are about, sources of all of them."""

from __future__ import annotations

import re
import string
from dataclasses import replace
from pathlib import Path

import pytest

from opcast.datasets.clusters import known_clusters
from opcast.datasets.truth import TruthError
from opcast.datasets.truth.cells import Cells
from opcast.datasets.truth.inference import options
from opcast.datasets.truth.published import (
    OPTION,
    PublishedRule,
    applied,
    columns_of,
    holds,
    known,
    named,
    publications,
)
from opcast.datasets.truth.serving import STARTED
from opcast.datasets.truth.shapes import shipped
from opcast.simulator.question.stack import STACK_DIRECTORY

KINDS = {"training", "inference", "encoder", "passes", "operator", "collective", "serving"}
# What rules may fill: columns of tables, and what only rules say.
COLUMNS = {"recompute", "precision", "sp", "vp", "ep", "zero_stage"}
TOLD = {
    "stack",
    "cluster",
    "shape",
    "stages",
    "micro_batches",
    "fsdp_shard_per_cp",
    "gb_means",
    "tokens_at_once",
    "config",
    "model_canon",
    "quantization",
    "kv_dtype",
    "lengths",
    "lora_rank",
    "lora_modules",
    "lora_dropout",
    "mtp_layers",
    "times",
    "empty_op_us",
    "nvls",
    *(f"serving_{name}" for name in STARTED),
    *("model_path", "model"),
    *(f"{pool}{name}" for pool in ("", "prefill_", "decode_") for name in ("tp", "attention_dp", "etp", "ep")),
    *("op", "op_kind", "gpu"),
}


def cells(**values: str) -> Cells:
    return Cells(values, 1)


@pytest.mark.parametrize(
    ("text", "condition", "met"),
    [
        ("FP8-CS", "^fp8-cs$", True),
        ("FP8-CSX", "^fp8-cs$", False),
        ("", {"not": "x"}, True),
        ("2", {"above": 1}, True),
        ("1", {"above": 1}, False),
        ("384.0", {"at_most": 384}, True),
        ("", {"at_most": 384}, False),
        ("many", {"above": 1}, False),
        ("4", {"not": {"above": 1}}, False),
    ],
)
def test_conditions(text: str, condition: object, met: bool) -> None:
    assert holds(text, condition) is met


def test_a_rule_fills_replaces_and_refuses() -> None:
    rule = PublishedRule(
        "a page", {"precision": "fp8"}, usual={"vp": 8}, set={"recompute": "ops", "options.full_graph": True}
    )
    told = applied(cells(precision="FP8", recompute="full"), rule)
    assert (told.text("vp"), told.text("recompute"), told.options) == ("8", "ops", {"full_graph": True})
    assert applied(cells(precision="FP8", vp="2"), rule).text("vp") == "2"
    assert applied(cells(precision="BF16"), rule) == cells(precision="BF16")
    with pytest.raises(TruthError, match="gpt-4 ran on paper"):
        applied(cells(model="gpt-4"), PublishedRule("a page", refuse="{model} ran on paper"))


@pytest.mark.parametrize(
    ("kind", "said", "stack"),
    [
        ("training", "Megatron-Bridge docs", "megatron"),
        ("training", "NeMo AutoModel docs", "nemo_automodel"),
        ("training", "MLPerf Training v5.1, NeMo on Megatron-Core", "nemo"),
        ("training", "AMD-AGI/Primus documents", "primus"),
        ("training", "SimuMax: Megatron-LM 0.14 with torch", "megatron_core"),
        ("training", "Narayanan et al. SC21 Table 2 (PTD-P vs ZeRO-3) | ZeRO3", "deepspeed_2021"),
        ("training", "Narayanan et al. SC21 Table 2 (PTD-P vs ZeRO-3) | PTD-P", "megatron2021"),
        ("training", "torchtitan benchmarks/llama3_h100_202412", "torchtitan_2024"),
        ("training", "torchtitan benchmarks/asyncTP", "torchtitan_early_2026"),
        ("training", "torchtitan benchmarks/asyncTP_llama3_h100_2025-06", "torchtitan_2025"),
        ("training", "torchtitan benchmarks/llama3-8b_h200_202506", "torchtitan_2025"),
        ("training", "", "megatron"),
        ("inference", "TensorRT-LLM docs performance.md v0.5.0", "trtllm_2023"),
        ("inference", "TensorRT-LLM docs perf-overview v1.0", "trtllm"),
        ("inference", "TensorRT-LLM docs perf-overview v0.17 online serving table", "trtllm_cpp"),
        ("inference", "NVIDIA NIM LLM benchmarking performance page", "trtllm_cpp"),
        ("inference", "Koyeb", "vllm"),
        ("inference", "", "trtllm"),
    ],
)
def test_a_row_belongs_to_one_publication(kind: str, said: str, stack: str) -> None:
    assert known(cells(source=said), kind).text("stack") == stack


def test_a_rule_looks_a_value_up_by_the_columns_of_a_row(tmp_path: Path) -> None:
    file = "input_len_tokens,batch_size,options.real_tokens\n32,1,0.3\n32,4|6,0.6\n64,>8,0.7\n,2,0.8\n"
    (tmp_path / "shares.csv").write_text(file)
    (tmp_path / "page.yaml").write_text(
        "of: [inference]\nrules:\n- set: {options.real_tokens: 0.5}\n"
        "  look_up: {file: shares.csv, by: [input_len_tokens, batch_size]}\n  source: a page of the engine\n"
    )
    wanted = {"1": 0.3, "4.0": 0.6, "6": 0.6, "8": 0.5, "2": 0.8}
    for batch, share in wanted.items():
        row = replace(cells(input_len_tokens="32", batch_size=batch), rules=tmp_path)
        assert known(row, "inference").options == {"real_tokens": share}, batch
    for batch, share in (("8", 0.5), ("9", 0.7)):
        row = replace(cells(input_len_tokens="64", batch_size=batch), rules=tmp_path)
        assert known(row, "inference").options == {"real_tokens": share}, batch


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no folder with rules"),
        ("rules: [{when: {}}]\nof: [training]\n", "source"),
        ("- nothing\n", "holds no rules"),
        ("of: [inference]\nrules: [{source: a page, look_up: {file: gone.csv, by: []}}]\n", "No such file"),
        ("of: [training]\nsaid: '('\nrules: []\n", "unterminated|missing"),
        ("of: [training]\nrules: [{source: a page, when: {gpu: '['}}]\n", "unterminated"),
        ("of: [training]\nrules: [{source: a page, when: {gpu: {below: 3}}}]\n", "below"),
        ("of: [training]\nrules: []\ncolumns: {tp: {of: ranks, words: '^a'}}\n", "no group"),
        ("of: [training]\nrules: []\ncolumns: {tp: {of: ranks}}\n", "words"),
        ("of: [training]\nrules: [{source: a page, look_up: {file: few.csv, by: [gpu, tp]}}]\n", "has no column tp"),
    ],
)
def test_a_folder_without_rules_is_refused_in_one_line(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "few.csv").write_text("gpu,pp\nA100,2\n")
    if text:
        (tmp_path / "page.yaml").write_text(text)
    with pytest.raises(TruthError, match=why) as error:
        publications(tmp_path)
    assert "rules" in str(error.value)


def test_columns_of_a_table_have_our_names_beside_their_own(tmp_path: Path) -> None:
    (tmp_path / "page.yaml").write_text(
        "of: [operator]\ntable: [millis]\ncolumns: {latency_ms: millis, M: {of: size, words: '^(\\d+)x'}, op: null}\n"
        "rules: []\n"
    )
    columns = columns_of(["millis", "size"], tmp_path)
    assert set(columns) == {"latency_ms", "M", "op"}
    assert named({"millis": "1.5", "size": "64x2", "op": "theirs, of another meaning"}, columns) == {
        "millis": "1.5",
        "size": "64x2",
        "latency_ms": "1.5",
        "M": "64",
    }
    assert not columns_of(["other"], tmp_path)


def test_without_rules_only_words_of_every_table_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opcast.datasets.truth.published.CHECKOUT", tmp_path)
    publications.cache_clear()
    try:
        told = known(cells(source="Megatron-Bridge docs", precision="FP8-CS"), "training")
        assert (told.text("stack"), told.options) == ("", {"fp8_scaling": "current"})
    finally:
        publications.cache_clear()


def test_every_rule_has_a_source_and_sets_what_exists() -> None:
    for publication in publications():
        assert set(publication.of) <= KINDS, publication.id
        re.compile(publication.said)
        for rule in publication.rules:
            assert len(rule.source) > 10, publication.id
            assert rule.usual or rule.set or rule.look_up or rule.refuse, publication.id
            assert bool(rule.lines) is bool(rule.look_up), publication.id
            looked_up = {name: "" for line in rule.lines for name in line if name not in rule.look_up["by"]}
            for name, value in {**rule.usual, **rule.set, **looked_up}.items():
                if (publication.of == ("operator",) and name in looked_up) or name in ("source", "basis"):
                    continue  # sizes of an op
                assert name.startswith(OPTION) or name in COLUMNS | TOLD, (publication.id, name)
                if name == "stack":
                    assert (STACK_DIRECTORY / f"{value}.yaml").is_file(), value
                if name == "cluster":
                    assert value in known_clusters()
                if name == "shape":
                    assert shipped(value)


@pytest.mark.parametrize("kind", ["training", "inference", "encoder", "passes"])
def test_every_kind_of_step_has_a_framework_where_no_source_is_told(kind: str) -> None:
    assert known(cells(engine="PyTorch:FT"), kind).text("stack")


@pytest.mark.parametrize("kind", ["training", "inference"])
def test_a_source_that_nobody_knows_has_no_framework(kind: str) -> None:
    assert not known(cells(source=string.ascii_letters), kind).text("stack")
    assert known(cells(source=string.ascii_letters, stack="torch"), kind).text("stack") == "torch"


@pytest.mark.parametrize(("told", "kept"), [("bf16", "same"), ("FP16", "same"), ("fp8_e4m3", "fp8"), ("auto", None)])
def test_keys_and_values_have_the_format_that_a_row_says(told: str, kept: str | None) -> None:
    """Also where it is that of activations, and the framework has another by itself."""
    assert options(cells(kv_dtype=told)).get("kv_dtype") == kept


def test_a_format_of_keys_that_nobody_knows_leaves_a_row_out() -> None:
    with pytest.raises(TruthError, match="kv_dtype='int3' is not known; take same, bf16"):
        options(cells(kv_dtype="int3"))
