"""Whether a newly trained predictor may take the place of the current one, and why: only where it is no worse.

On the same rows and the same evaluation the errors on held-out groups decide. On other rows these say different things:
harder rows make a better predictor look worse. Then the current one is asked about the new one's rows as well. It may
have learned some of them, so that a new one that has not and is no worse is better.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

SLACK = 1.01  # a mean error within a hundredth is no worse
EVALUATION = ("split", "seed", "stated_coverage")


class Verdict(NamedTuple):
    promoted: bool
    why: str


def judge(
    new: Mapping[str, Any], current: Mapping[str, Any] | None, force: bool = False, answered: float | None = None
) -> Verdict:
    """The verdict from two predictors' cards; ``current`` is None where there is none, or none that can be read.

    ``answered``: mean error in percent of the current one on the rows that the new one was scored on.
    """
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
    errors += f", on other rows or another evaluation ({new.get('n')} rows against {current.get('n')})"
    if answered is None:
        return Verdict(no_worse, errors)
    return Verdict(
        no_worse or after <= answered * SLACK, f"{errors}; on these rows the current one errs by {answered:.2f} %"
    )
