"""TTFT and TPOT of a closed loop in steady state, without an event loop.

``concurrency`` clients each send one request after another. Each request brings one prompt and ``output - 1`` decode
steps, so that in as many iterations as it has tokens the others bring a prompt each: an iteration takes as long as
decoding, and by so much more as its share of prompts takes. Requests that do not fit into the KV memory wait, by
Little's law in proportion. All start at once, which the mean TTFT of a run of ten requests a client holds one part in
ten of: then prompts queue behind each other.
"""

from __future__ import annotations

from dataclasses import dataclass

from .iteration import IterationTables, iteration_us

BURST = 0.1  # of the requests of a run, ten a client, are sent at its start


@dataclass(frozen=True)
class ClosedLoop:
    """A closed loop on one replica: mean tokens in and out, and what its engine allows.

    ``kv_tokens`` fit; with ``mixed`` prompts run beside decodes, in chunks of ``max_tokens``; else alone, while
    decodes wait. With ``reserves`` a request holds its whole length from the start. ``burst`` is the share of the
    requests that come at once at the start of the run.
    """

    concurrency: float
    input_len: float
    output_len: float
    kv_tokens: float = float("inf")
    max_tokens: int = 8192
    mixed: bool = True
    reserves: bool = False
    graphs: tuple[int, ...] = ()
    burst: float = BURST


def closed_form(tables: IterationTables, loop: ClosedLoop) -> tuple[float, float]:
    """(mean TTFT, mean TPOT) in microseconds, on the GPU alone."""
    length = loop.input_len + (loop.output_len if loop.reserves else loop.output_len / 2)
    running = max(min(float(loop.concurrency), loop.kv_tokens / length), 1.0)
    context = loop.input_len + loop.output_len / 2
    padded = next((size for size in loop.graphs if size >= running), running)
    decode_us = iteration_us(tables, padded, running * context, 0, 0.0, 0, padded)  # type: ignore[arg-type]
    prompt_us, iterations = _prompt(tables, loop, running, context)
    more_us = max(prompt_us - iterations * decode_us, 0.0) if loop.mixed else prompt_us
    tpot = decode_us + running / loop.output_len * more_us
    first = prompt_us + tpot / 2
    burst = prompt_us * (running + 1) / 2
    waiting = (loop.concurrency / running - 1) * (tpot * loop.output_len + first)
    return (1 - loop.burst) * first + loop.burst * burst + waiting, tpot


def _prompt(tables: IterationTables, loop: ClosedLoop, running: float, context: float) -> tuple[float, int]:
    """Microseconds of the iterations that one prompt takes, decodes beside it where they mix; how many they are."""
    beside = max(running - 1, 0.0) if loop.mixed else 0.0
    room = max(loop.max_tokens - beside, 1.0)
    remaining, done, total, iterations = loop.input_len, 0.0, 0.0, 0
    while remaining > 0:
        new = min(remaining, room)
        pairs = new * (done + (new + 1) / 2)
        samples = beside + (new == remaining)
        total += iteration_us(tables, beside, beside * context, new, pairs, done, samples)  # type: ignore[arg-type]
        remaining, done, iterations = remaining - new, done + new, iterations + 1
    return total, iterations
