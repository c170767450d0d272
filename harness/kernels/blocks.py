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


SCALE_BLOCK = 128  # elements of fp8 that share a scale, along k and along n
LEAST_ROWS, MOST_ROWS = 16, 64  # of a tile: what tensor cores take at least, and what leaves registers for the sums
TILE_GROUP = 32  # tiles of rows that programs go down before they go on along n


@dataclass(frozen=True)
class ProductTile:
    """Rows and columns of a product that one program makes, and in which order and how programs go."""

    rows: int
    cols: int
    group: int
    warps: int
    stages: int


def product_tile(rows: int) -> ProductTile:
    """A tile for products in blocks of fp8: within one block of scales along n, low where there are few rows.

    Tiles of few rows are half as wide, so that the weights are read by twice as many programs. Three stages of the
    largest hold 72 KiB, of the 99 that a block has on compute capability 8.9 and 12.0.
    """
    height = min(max(power_of_two(rows), LEAST_ROWS), MOST_ROWS)
    return ProductTile(height, SCALE_BLOCK if height == MOST_ROWS else SCALE_BLOCK // 2, TILE_GROUP, 4, 3)
