"""Whatever stands in a YAML or JSON: values that can be worked with, or one line."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from opcast.datasets.reading import DEEPEST, problem, read_json, read_yaml


class DamagedError(ValueError):
    """What the reader of a file raises."""


BOMB = "[" + ", ".join(f"&a{n} [{', '.join([f'*a{n - 1}' if n else '1'] * 10)}]" for n in range(9)) + "]"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * 10_000, "no YAML"),
        ("[" * 10_000 + "]" * 10_000, "nested "),
        ("[" * 200 + "]" * 200, "nested more than 100 deep"),
        ("&a [*a]", "nested more than 100 deep"),
        (BOMB, "more than 3,000,000 values"),
        ("a: " + "9" * 5000, "no YAML: Exceeds the limit"),
        ("a: [1, -" + "9" * 400 + "]", "more than 300 digits"),
        ("a: !!int ''", "no YAML"),
        ("a: !!bool foo", "no YAML"),
        ("a: !!timestamp foo", "no YAML"),
        ("a: 2001-99-99", "no YAML: month must be in 1..12"),
        ('a: "\\ud800"', "no YAML: line 1"),
        ("a: 1\nb: [\n", "no YAML: line 3"),
    ],
)
def test_a_yaml_that_nobody_can_work_with(text: str, says: str, tmp_path: Path):
    with pytest.raises(DamagedError) as found:
        read_yaml(text, DamagedError, "the plan")
    assert str(found.value).startswith("the plan ")
    assert says in str(found.value)
    (tmp_path / "plan.yaml").write_text(text)
    with pytest.raises(DamagedError, match=r"plan\.yaml"):
        read_yaml(tmp_path / "plan.yaml", DamagedError)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 10_000,
        "[" * 10_000 + "]" * 10_000,
        '{"a":' * 200 + "1" + "}" * 200,
        "9" * 5000,
        "9" * 400,
        '"\\ud800"',
        "",
    ],
)
def test_a_json_that_nobody_can_work_with(text: str):
    with pytest.raises(DamagedError, match=r"^the plan ") as found:
        read_json(text, DamagedError, "the plan")
    assert "\n" not in str(found.value)


def test_what_can_be_read():
    assert read_yaml("a: [1, {b: .inf}]", DamagedError) == {"a": [1, {"b": math.inf}]}
    assert read_json('{"a": [1, 1e400, "\\u0663"]}', DamagedError) == {"a": [1, math.inf, "٣"]}
    deep: object = 1
    for _ in range(DEEPEST - 1):
        deep = [deep]
    assert problem(deep) == ""
    assert problem([deep])


@pytest.mark.parametrize(("name", "says"), [("none.yaml", "No such file"), (".", "directory"), ("bytes", "no text")])
def test_a_file_that_cannot_be_read(name: str, says: str, tmp_path: Path):
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DamagedError, match=says):
        read_yaml(tmp_path / name, DamagedError)
