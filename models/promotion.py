"""Whether a newly trained predictor may take the place of the current one, and why.

On the same rows and the same evaluation the errors decide. On other rows they say different things: then the new one
yields only if it is worse and knows fewer rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

SLACK = 1.01  # a mean error within a hundredth is no worse
EVALUATION = ("split", "seed", "stated_coverage")


class Verdict(NamedTuple):
    promoted: bool
    why: str


def judge(new: Mapping[str, Any], current: Mapping[str, Any] | None, force: bool = False) -> Verdict:
    """The verdict from two predictors' cards; ``current`` is None where there is none, or none that can be read."""
    if force:
        return Verdict(True, "as asked (promote=true)")
    if current is None:
        return Verdict(True, "the first of its kind, device and backend")
    before, after = current.get("test_mean_ape"), new.get("test_mean_ape")
    if before is None or after is None:
        return Verdict(True, "the current one was never evaluated")
    errors = f"mean error {after:.2f} % against {before:.2f} % of the current version {current.get('version')}"
    no_worse = after <= before * SLACK
    if all(new.get(name) == current.get(name) for name in (*EVALUATION, "fingerprint")):
        return Verdict(no_worse, f"{errors} on the same rows and evaluation")
    rows = f"{new.get('n')} rows against {current.get('n')}"
    promoted = no_worse or new.get("n", 0) >= current.get("n", 0)
    return Verdict(promoted, f"{errors}, on other rows or another evaluation ({rows})")
