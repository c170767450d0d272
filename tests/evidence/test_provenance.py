"""Every figure says where it is from, and what was read off measured results is not known where these are scored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

import pytest

from opcast.datasets.figure_sources import KINDS
from opcast.datasets.truth import read_table
from opcast.datasets.truth.cells import FILL, REFUSE
from opcast.datasets.truth.published import BASES, READ_OFF, Publication, publications
from opcast.jobs import listing
from opcast.simulator.serving.engines import engine_figures, known_serving_engines, load_serving_engine

WORDS = {kind.replace("_", " ") for kind in KINDS if kind != "read_off"}


def is_said(basis: str) -> bool:
    """Whether all kinds of evidence that a basis names are known ones."""
    return bool(basis) and all(each in WORDS or each.removeprefix(READ_OFF) in tables() for each in basis.split(", "))


def tables() -> set[str]:
    """Tables that figures may be read off: those that a score leaves out."""
    import json

    scores = Path(__file__).with_name("calibration_scores.json")
    return set(json.loads(scores.read_text())) | {"serving_silicon"}


def test_every_figure_of_stacks_engines_hosts_and_tunings_says_where_it_is_from() -> None:
    heads, rows = listing.figures({})
    found = [dict(zip(heads, row, strict=True)) for row in rows]
    silent = [(row["stack"], row["setting"]) for row in found if not is_said(row["from"]) or len(row["evidence"]) < 15]
    assert not silent
    rooms = {row["stack"].partition(" ")[0] for row in found}
    assert {"serving", "nccl", "megatron"} <= rooms


@pytest.mark.parametrize("name", known_serving_engines())
def test_no_number_of_an_engine_is_forgotten(name: str) -> None:
    engine = load_serving_engine(name)
    listed = {figure for figure, _, _ in engine_figures(engine)}
    for part in ("kv", "graphs", "host"):
        numbers = {
            f"{part}.{key}" for key, value in asdict(getattr(engine, part)).items() if type(value) in (int, float)
        }
        assert numbers <= listed


def bases(publication: Publication) -> Iterator[tuple[str, str]]:
    """(what is known, its basis) of all rules of a file and lines of the files that they look up in."""
    for rule in publication.rules:
        yield rule.source, rule.basis
        yield from ((rule.source, line["basis"]) for line in rule.lines if "basis" in line)


@pytest.mark.parametrize("publication", publications(), ids=lambda each: each.id)
def test_every_rule_says_of_which_kind_its_source_is(publication: Publication) -> None:
    for source, basis in bases(publication):
        assert basis in BASES or basis.removeprefix(READ_OFF) in tables(), (source, basis)
        inferred = source.startswith("inferred") or "inferred:" in source
        assert not inferred or basis.startswith(READ_OFF), source


RULES = """of: [training]
said: somebody
rules:
  - usual: {stack: megatron}
    basis: documented
    source: "their page"
  - when: {measured: slow}
    set: {stack: nanotron}
    basis: read off some_table
    source: "runs that took long"
  - when: {measured: odd}
    refuse: "an odd run"
    basis: read off some_table
    source: "inferred: nobody runs so"
"""
ROWS = """source,id,measured,model_canon,gpu_canon,num_gpus,precision,seq_len_tokens,gbs_seqs,mbs_seqs,tp,pp,step_time_s
somebody,a,,tiny_llama_100m,h100_sxm,8,bf16,4096,64,1,1,1,0.2
somebody,b,slow,tiny_llama_100m,h100_sxm,8,bf16,4096,64,1,1,1,0.4
somebody,c,odd,tiny_llama_100m,h100_sxm,8,bf16,4096,64,1,1,1,0.6
"""


def read(folder: Path, **more: tuple[str, ...]):
    """The table of three rows under the rules."""
    (folder / "rules").mkdir(exist_ok=True)
    (folder / "rules" / "somebody.yaml").write_text(RULES)
    (folder / "some_table.csv").write_text(ROWS)
    return read_table(folder / "some_table.csv", rules=folder / "rules", **more)


def frameworks(rows: object) -> Mapping[str, str]:
    return {row.id: row.framework for row in rows}  # type: ignore[attr-defined]


def test_what_results_told_chooses_nothing_where_rows_are_scored(tmp_path: Path) -> None:
    table = read(tmp_path)
    assert frameworks(table.rows) == {"a": "megatron", "b": "megatron"}
    assert [(row.id, row.by_outcome) for row in table.unsupported] == [("c", True)]
    assert frameworks(table.by_outcome) == {"c": "megatron"}
    assert table.count == 3


def test_a_fit_may_know_results(tmp_path: Path) -> None:
    table = read(tmp_path, outcomes=(FILL, REFUSE))
    assert frameworks(table.rows) == {"a": "megatron", "b": "nanotron"}


def test_a_basis_that_is_none_is_said(tmp_path: Path) -> None:
    read(tmp_path)
    path = tmp_path / "rules" / "somebody.yaml"
    path.write_text(RULES.replace("documented", "hearsay"))
    publications.cache_clear()
    with pytest.raises(ValueError, match="basis: 'hearsay' is none of documented, code"):
        publications(tmp_path / "rules")
