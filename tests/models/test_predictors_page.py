"""docs/predictors.md lists every feature with its reason as the code has them.

``python tests/models/test_predictors_page.py`` writes the table into the page anew.
"""

from __future__ import annotations

import re
from pathlib import Path

from opcast.datasets.ops import KINDS
from opcast.models.baselines import BASELINES
from opcast.models.candidates import CANDIDATES
from opcast.models.features import REASONS, feature_names, reason
from opcast.models.splits import MODES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "predictors.md"
PART = re.compile(r"(<!-- features -->\n).*?(<!-- end of features -->)", re.DOTALL)


def table() -> str:
    """Features of all kinds by the reason that covers them, with the number of kinds that have one."""
    names = {kind: feature_names(kind) for kind in KINDS}
    rows = ["| feature | why it is there | kinds |", "| --- | --- | --- |"]
    for start, why in REASONS.items():
        own = {name for each in names.values() for name in each if reason(name) == why and name.startswith(start)}
        count = sum(any(name in own for name in each) for each in names.values())
        if own:
            shown = f"`{start}…`" if start.endswith("_") else f"`{start}`"
            rows.append(f"| {shown} | {why} | {'all' if count == len(KINDS) else count} |")
    return "\n".join(rows) + "\n"


def test_the_table_of_features_is_the_codes() -> None:
    found = PART.search(PAGE.read_text())
    assert found is not None
    assert found[0] == f"{found[1]}{table()}{found[2]}", "run this file to write the table anew"


def test_modes_candidates_and_baselines_are_explained() -> None:
    text = PAGE.read_text()
    assert not [name for name in (*MODES, *CANDIDATES, *BASELINES) if f"`{name}`" not in text]


if __name__ == "__main__":
    PAGE.write_text(PART.sub(lambda found: f"{found[1]}{table()}{found[2]}", PAGE.read_text()))
