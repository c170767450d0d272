"""How much of a matrix one program takes, and with how many warps."""

from __future__ import annotations

from dataclasses import dataclass

WHOLE_ROW = 16384  # longest row that one program keeps in registers
PER_PROGRAM = 4096  # elements a program aims at when rows are short
ENOUGH_PROGRAMS = 512  # about four for each multiprocessor of the largest devices
PER_WARP = 512  # elements: 16 a lane, two vector loads of 16 bits


def power_of_two(number: int) -> int:
    """The smallest power of two that is no smaller."""
    return 1 << max(number - 1, 0).bit_length()


@dataclass(frozen=True)
class Tile:
    """Rows and columns that one program takes at a time, and in how many steps it covers a row."""

    rows: int
    cols: int
    warps: int
    steps: int


def tile(rows: int, cols: int) -> Tile:
    """A tile for one pass over each row: several short rows at once, but never so many that programs get few."""
    width = min(power_of_two(cols), WHOLE_ROW)
    height = max(1, PER_PROGRAM // width)
    while height > 1 and rows < height * ENOUGH_PROGRAMS:
        height //= 2
    warps = max(1, min(16, height * width // PER_WARP))
    return Tile(height, width, warps, -(-cols // width))
