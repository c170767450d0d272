"""Counts of things in words."""

from __future__ import annotations


def counted(number: float, noun: str, several: str = "") -> str:
    """A number of things: "1 GPU", "2,000 GPUs"; ``several`` where the plural takes more than an s."""
    return f"{number:,.0f} {noun if number == 1 else several or f'{noun}s'}"
