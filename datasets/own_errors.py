"""Errors of opcast's own are answers: what a question is refused for. All others are faults, and go on."""

from __future__ import annotations


def refusal(error: ValueError) -> str:
    """What an error of opcast says, on one line; any other is raised again."""
    if not type(error).__module__.startswith("opcast"):
        raise error
    return " ".join(str(error).split()) or type(error).__name__
