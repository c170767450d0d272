"""The page of post-training: its figures, its phases in time, and the tables behind them."""

from __future__ import annotations

from ...datasets.counts import counted
from ..html.page import Card, Page, PageSection, Picture, drawn_table, notes_sections
from ..job.page import card
from .answer import PostTrainReport
from .phases import ROLL
from .picture import draw_phases
from .shown import headline, tables


def page(report: PostTrainReport) -> Page:
    """Everything the page shows."""
    time_section = PageSection(
        "time",
        "Phases in time",
        "Which GPUs do what when; grey is waiting. Below: how many responses of a batch still run.",
        (Picture("Phases of three iterations", draw_phases(report)),),
    )
    figures_section = PageSection("figures", "Figures", "", tuple(drawn_table(table) for table in tables(report)))
    return Page(
        title=f"{report.model}: {report.method}, phase by phase",
        subtitle=headline(report),
        facts=(
            counted(report.iterations, "iteration"),
            f"{counted(report.lives, 'life', 'lives')}, seed {report.seed}",
        ),
        cards=tuple(cards(report)),
        sections=(time_section, figures_section, *notes_sections(report.notes)),
    )


def cards(report: PostTrainReport) -> list[Card]:
    """Headlines: the median, and what most lives lie between."""
    cards_shown = [
        card("Iteration, s", report.iteration_s, "{:,.4g}"),
        card("Tokens/s a GPU", report.tokens_per_s_per_gpu, "{:,.0f}"),
        card("Run, hours", report.hours, "{:,.3g}"),
    ]
    if report.rollout is not None:
        share = report.phase_s(ROLL) / report.iteration_s.mean
        cards_shown.append(
            Card(
                "Rollout",
                (("of an iteration", f"{min(share, 1.0):.0%}"),),
                (("less than a tenth of the responses run", f"{report.rollout.tail_share:.0%} of it"),),
                "" if report.fits else "does not fit",
                "" if report.fits else "poor",
            )
        )
    return cards_shown
