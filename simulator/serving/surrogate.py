"""How long iterations of one model, layout, engine and device take: tables kept on disk, with their own error.

:func:`surrogate` finds them by the request, or has them tabulated (:mod:`.tabulate`) and checked against steps
simulated directly: random batches that none of the tables was made from.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...datasets.files import write_atomically
from ...datasets.version import __version__
from ..question.calibration import load_calibration
from ..question.canonical import RequestError
from ..question.work import Work
from ..trace.models import digest, resolve
from .between import Simulate
from .figures import SeenSteps, StepFigures
from .iteration import IterationTables, iteration_us
from .kv import KvBudget
from .steps import ReplicaSteps, steps_of
from .tabulate import Extent, tabulate

if TYPE_CHECKING:
    from ..engines.bench import Bench
    from ..question.requests import SimulateRequest

FORMAT = 11
CHECKED = 16  # random batches that tables are checked on
ARRAYS = IterationTables._fields[:-1]


@dataclass(frozen=True)
class HeldOut:
    """Errors of tables on random batches, in percent of the step simulated directly."""

    n: int = 0
    median_ape: float = 0.0
    p90_ape: float = 0.0
    max_ape: float = 0.0
    bias: float = 0.0


@dataclass(frozen=True)
class Surrogate:
    """The tables of one model, layout, engine and device, how far off they are, and what is known of their steps.

    ``kv`` is its memory where that is kept with them, ``sources`` the share of kernel time by whose measurements.
    """

    tables: IterationTables
    held_out: HeldOut = HeldOut()
    figures: StepFigures | None = None
    kv: KvBudget | None = None
    sources: Mapping[str, float] = field(default_factory=dict)

    def iteration_us(self, work: Work) -> float:
        """Microseconds of a batch: that of ``workload=batch``."""
        batch = work.iteration
        decodes = max(batch.decoding, batch.tokens) if not batch.prompts else batch.decoding
        return iteration_us(
            self.tables,
            decodes,
            batch.decode_context,
            batch.prefill_tokens,
            batch.prefill_pairs,
            batch.prefill_context,
            max(decodes if not batch.prompts else batch.sampled, 1),
        )


def surrogate(request: SimulateRequest, bench: Bench, extent: Extent, folder: Path | None = None) -> Surrogate:
    """The surrogate of a request's model, layout, stack and device, from disk where it is known.

    ``request.work`` does not matter. Without a ``folder`` nothing is kept. Raises the errors of :func:`..simulate`.
    """
    path = None if folder is None else folder / f"{key_of(request, bench, extent)}.npz"
    return load_or_make(path, lambda: make_surrogate(steps_of(request, bench), extent))


def load_or_make(path: Path | None, make: Callable[[], Surrogate]) -> Surrogate:
    """The surrogate of a file, or one made now and kept there; without a ``path`` nothing is kept."""
    cached = None if path is None else read(path)
    if cached is not None:
        return cached
    tables = make()
    if path is not None:
        write(path, tables)
    return tables


def make_surrogate(steps: ReplicaSteps, extent: Extent) -> Surrogate:
    """The surrogate of a replica's steps, tabulated and checked now."""
    recorder = SeenSteps(steps.simulate_all)
    tables = tabulate(recorder, steps.kernels, extent)
    errors = errors_on_random_batches(Surrogate(tables), steps.simulate_all, extent)
    return Surrogate(tables, errors, recorder.figures, sources=recorder.sources)


def errors_on_random_batches(tables: Surrogate, simulate: Simulate, extent: Extent) -> HeldOut:
    """Errors on random batches against their direct simulation."""
    works = random_batches(extent, CHECKED)
    predicted = np.array([tables.iteration_us(work) for work in works])
    direct = np.array([state.total_us for state in simulate(works)])
    off = 100 * (predicted / direct - 1)
    apes = np.abs(off)
    return HeldOut(len(works), *map(float, (np.median(apes), np.quantile(apes, 0.9), apes.max(), off.mean())))


def random_batches(extent: Extent, count: int, seed: int = 0) -> list[Work]:
    """Batches of all sizes: decoding alone, prompts alone (some of them chunks), and both."""
    random = np.random.default_rng(seed)

    def log_uniform(least: float, most: float) -> int:
        return int(np.exp(random.uniform(np.log(least), np.log(max(most, least)))))

    batches = []
    for index in range(count):
        decodes: list[tuple[int, int]] = []
        prompts: list[tuple[int, int]] = []
        if index % 3 != 1:
            total = log_uniform(1, extent.sequences)
            parts = [total - total // 2, total // 2] if total > 1 else [1]
            decodes = [(sequences, log_uniform(64, extent.context / 2)) for sequences in parts]
        if index % 3 != 0:
            budget = log_uniform(64, extent.tokens)
            for _ in range(int(random.integers(1, 4))):
                new = min(log_uniform(16, extent.tokens), budget, extent.context)
                cached = int(random.integers(0, 2)) * log_uniform(1, max(extent.context / 2 - new, 1))
                if new > 0:
                    prompts.append((new, cached))
                    budget -= new
        batches.append(Work("batch", prompts=tuple(prompts), decodes=tuple(decodes)))
    return batches


# --- on disk -----------------------------------------------------------------------------------------------


def key_of(request: SimulateRequest, bench: Bench, extent: Extent) -> str:
    """What a surrogate is kept under: everything that it depends on.

    RequestError for a model that is a function, which nothing identifies.
    """
    source = resolve(request.model)
    if source.identity is None:
        raise RequestError(f"model {source.name} cannot be kept on disk: name it as module:callable")
    about = {
        "request": replace(request, work=Work("batch", decodes=((1, 1),), expert_load=request.work.expert_load)).key(),
        "model": source.identity,
        "stored": digest([source.quantization, source.dtype]),
        "device": repr(bench.device(request.device, request.cluster)),
        "known": bench.stamp,
        "extent": [extent.sequences, extent.tokens, extent.context],
    }
    return table_key(about, request.sources.calibration)


def table_key(about: Mapping[str, Any], calibration: str) -> str:
    """What tables are kept under: a hash of what they are about, of the calibration's content and opcast's version."""
    more = {"format": FORMAT, "opcast": __version__, "calibration": repr(load_calibration(calibration))}
    return hashlib.sha256(json.dumps({**about, **more}, sort_keys=True).encode()).hexdigest()[:32]


def write(path: Path, tables: Surrogate) -> Path:
    """Keeps a surrogate, all of it or nothing."""
    named: dict[str, Any] = {name: np.asarray(table) for name, table in tables.tables._asdict().items()}
    errors = np.array(
        [tables.held_out.n, *(getattr(tables.held_out, name) for name in list(vars(tables.held_out))[1:])]
    )
    if tables.figures is not None:
        named |= {f"step_{name}": value for name, value in tables.figures._asdict().items()}
    content = io.BytesIO()
    if tables.kv is not None:
        named["kv"] = np.array([tables.kv.blocks, tables.kv.block_tokens, tables.kv.bytes_per_token])
    named |= {"sources": np.array([*tables.sources], dtype=str), "source_shares": np.array([*tables.sources.values()])}
    np.savez(content, held_out=errors, **named)
    return write_atomically(path, lambda temporary: temporary.write_bytes(content.getvalue()), RequestError)


def read(path: Path) -> Surrogate | None:
    """The surrogate of a file; None where there is none, or it cannot be read."""
    try:
        with np.load(path, allow_pickle=False) as file:
            tables = IterationTables(*(file[name] for name in ARRAYS))
            count, *errors = file["held_out"].tolist()
            has_idle_watts = "step_idle_w" in file
            figures = StepFigures(*(file[f"step_{name}"] for name in StepFigures._fields)) if has_idle_watts else None
            sources = dict(zip(file["sources"].tolist(), file["source_shares"].tolist(), strict=True))
            blocks, block_tokens, size = file["kv"].tolist() if "kv" in file else (0, 0, 0)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    kv = KvBudget(int(blocks), int(block_tokens), size) if blocks else None
    return Surrogate(tables, HeldOut(int(count), *errors), figures, kv, sources)
