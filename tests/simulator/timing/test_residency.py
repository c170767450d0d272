"""Cold fractions in one go against the plain walk that they stand for, node by node."""

from __future__ import annotations

import math

import numpy as np
import pytest

from opcast.simulator.graph import Block, Node
from opcast.simulator.timing.residency import NEVER, cold_blocks, last_freed


def cold_fractions(nodes: list[Node], sizes: np.ndarray, cache_bytes: float, code_bytes: int = 0) -> np.ndarray:
    """:func:`cold_blocks` of nodes in execution order, unrolled."""
    return cold_blocks((Block(tuple(nodes)),), (1,), sizes, cache_bytes, code_bytes)


def walked(nodes: list[Node], tensor_bytes: np.ndarray, cache_bytes: float, code_bytes: int) -> np.ndarray:
    sizes = tensor_bytes.tolist()
    touched: dict[int, float] = {}
    blocks: dict[int, list[float]] = {}  # freed memory by size: when each block was touched, the last freed last
    cold = np.zeros(len(nodes))
    clock = 0.0
    called: dict[str, float] = {}  # operators: when each ran last
    made: set[int] = set()  # by the step itself, and not yet freed

    def gone(distance: float) -> float:
        return 1.0 - math.exp(-distance / cache_bytes)

    def free(tensor: int) -> None:
        blocks.setdefault(sizes[tensor], []).append(touched.pop(tensor))
        made.discard(tensor)

    for counted in (False, True):
        for index, node in enumerate(nodes):
            reads = set(node.reads)
            tensors = reads.union(node.writes)
            total = float(code_bytes)
            missing = code_bytes * gone(clock - called.get(node.source, NEVER))
            for tensor in tensors:
                size = sizes[tensor]
                if tensor not in touched:
                    block = blocks.get(size)
                    touched[tensor] = block.pop() if block else NEVER
                    if tensor not in reads:
                        made.add(tensor)
                moved = min(size, node.bytes_moved)
                total += moved
                missing += moved * gone(clock - touched[tensor] + size / 2)  # its own bytes pass too
            if counted and total:
                cold[index] = missing / total
            clock += total - code_bytes
            called[node.source] = clock
            for tensor in tensors:
                touched[tensor] = clock
            for tensor in node.frees:
                if tensor in touched:
                    free(tensor)
        for tensor in sorted(made):  # what a step leaves, its caller drops before the next
            free(tensor)
    return cold


def some_block(rng: np.random.Generator, repeat: int, first: int) -> Block:
    """Nodes that read, write and free at random among twelve tensors from ``first`` on, some with steps."""

    def some(least: int, most: int) -> tuple[int, ...]:
        chosen = rng.choice(12, int(rng.integers(least, most)), replace=False) + first
        return tuple(sorted(chosen.tolist()))

    nodes = tuple(
        Node(None, str(rng.integers(3)), "", "forward", some(0, 4), some(1, 3), int(rng.integers(1, 99)), some(0, 3))
        for _ in range(int(rng.integers(1, 7)))
    )
    steps = {first + t: int(rng.integers(1, 3)) for t in range(12) if rng.random() < 0.5}
    uneven = {(which, 0): some(0, 3) for which in (0, -1)}
    return Block(nodes, repeat, steps, uneven=uneven)


@pytest.mark.parametrize("code_bytes", [0, 37])
def test_cold_fractions_are_those_of_the_walk_node_by_node(code_bytes: int) -> None:
    for seed in range(60):
        rng = np.random.default_rng(seed)
        blocks = [some_block(rng, int(rng.integers(1, 6)), int(rng.integers(9))) for _ in range(3)]
        counts = [int(rng.integers(1, block.repeat + 1)) for block in blocks]
        sizes, pairs = rng.choice([5, 8, 40, 90], 64), zip(blocks, counts, strict=True)
        nodes = [node for block, count in pairs for r in range(count) for node in block.repetition(r)]
        expected = walked(nodes, sizes, 150.0, code_bytes)
        assert expected.min() < expected.max(), seed
        near = pytest.approx(expected, abs=1e-12)
        assert cold_blocks(blocks, counts, sizes, 150.0, code_bytes) == near, seed
        assert cold_fractions(nodes, sizes, 150.0, code_bytes) == near, seed


def test_memory_is_taken_from_the_block_freed_last_of_its_size() -> None:
    freed = np.array([True, True, False, False, False, True, False])
    size = np.array([8, 8, 8, 4, 8, 8, 8])
    value = np.arange(7.0)
    assert last_freed(size, np.arange(7), freed, value).tolist() == [NEVER, NEVER, 1.0, NEVER, 0.0, NEVER, 5.0]


def test_no_nodes_have_no_fractions() -> None:
    assert len(cold_fractions([], np.zeros(0, dtype=np.int64), 1.0)) == 0
