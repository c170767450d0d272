"""Sequences of a batch with real lengths, and the micro-batches that they are trained in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..question.canonical import RequestError
from ..serving.arrivals import lengths
from .request import PostTrainRequest

COLUMNS = ("prompt_tokens", "response_tokens")
TOGETHER = 4096  # sequences that are put into bins at a time


@dataclass(frozen=True)
class LengthBatch:
    """Tokens of ``prompt`` and ``response`` of each sequence, int64 [sequences]; so many ``responses`` to a prompt lie
    together. ``cut`` prompts were longer than a sequence may be."""

    prompt: np.ndarray
    response: np.ndarray
    responses: int = 1
    cut: int = 0

    @property
    def group(self) -> np.ndarray:
        """The prompt of each sequence."""
        return np.arange(len(self.prompt)) // self.responses

    @property
    def total(self) -> np.ndarray:
        """Tokens of each sequence."""
        return self.prompt + self.response

    @property
    def tokens(self) -> int:
        """Tokens of the batch."""
        return int(self.total.sum())


@dataclass(frozen=True)
class MicroBatches:
    """What a data rank runs in an optimizer step: so many micro-batches of ``micro_batch`` sequences of ``seq_len``.

    Packed sequences of unequal lengths are simulated as equal ones with as many tokens and as many pairs of tokens in
    attention: ``seq_len`` is the mean length, weighted by length.
    """

    seq_len: int
    micro_batch: int
    count: int

    @property
    def tokens(self) -> int:
        """Tokens of a rank in a step, padding included."""
        return self.seq_len * self.micro_batch * self.count


def batch_of(request: PostTrainRequest, index: int, prompts: int | None = None) -> LengthBatch:
    """A batch, of another draw for each ``index``: that of its settings, or so many prompts."""
    responses = request.responses_of_prompt
    count = request.prompts if prompts is None else prompts
    random = [np.random.default_rng([request.seed, index, column]) for column in range(2)]
    if request.lengths is not None:
        file_rows = lengths_of_file(request.lengths)
        rows = random[0].integers(0, len(file_rows), count)
        of_prompt = file_rows[rows, 0]
        others = random[1].integers(0, len(file_rows), count * responses)
        response = file_rows[rows, 1] if responses == 1 else file_rows[others, 1]
    else:
        of_prompt = lengths(request.prompt_len, random[0], count)
        response = lengths(request.response_len, random[1], count * responses)
    most = request.step.work.seq_len
    longest = max(most - 1, 1)
    prompt = np.repeat(np.minimum(of_prompt, longest), responses)
    cut = int((of_prompt > longest).sum())
    return LengthBatch(prompt, np.minimum(response, np.maximum(most - prompt, 1)), responses, cut)


def lengths_of_file(path: str) -> np.ndarray:
    """Tokens of prompt and response of each row, int64 [rows, 2]. RequestError for a file that has none."""
    import pandas as pd

    try:
        table = pd.read_csv(Path(path).expanduser())
        values = table[list(COLUMNS)].to_numpy(dtype=np.float64)
    except (OSError, ValueError, KeyError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "it has no such columns"
        raise RequestError(f"lengths={path} must be a CSV file with {' and '.join(COLUMNS)}: {reason}") from None
    if not len(values) or not np.isfinite(values).all() or values.min() < 1:
        raise RequestError(f"lengths={path} must have a token in each prompt and response, and a row at least")
    return np.rint(values).astype(np.int64)


def micro_batches(
    request: PostTrainRequest, batches: Sequence[LengthBatch], devices: int, micro_batch: int | None = None
) -> MicroBatches:
    """What each data rank runs in an optimizer step, the mean of ``batches``; ``micro_batch``: another than training's.

    - ``balanced``: micro-batches of ``micro_batch * seq_len`` tokens, balanced over the data ranks (veRL's
      ``ppo_max_token_len_per_gpu`` and ``balance_batch``).
    - ``bins``: :func:`filled_bins` of as many tokens at most, as many on each rank (NeMo-RL's
      ``modified_first_fit_decreasing``). Stages of a pipeline exchange tensors of one size, so that all are padded to
      the fullest (``pad_full_seq_to`` of its Megatron worker).
    - ``none``: sequences are as long as the longest of the batch.
    """
    work, layout = request.step.work, request.step.parallel
    micro_batch = micro_batch or work.micro_batch
    ranks = data_ranks(request, devices)
    steps = request.optimizer_steps // request.epochs
    total = np.concatenate([batch.total for batch in batches]).astype(np.float64)
    sequences = request.sequences / steps
    unit = 2 * layout.tp * layout.cp if layout.tp * layout.cp > 1 else 1
    if request.packing == "none":
        longest = int(max(batch.total.max() for batch in batches))
        count = max(math.ceil(sequences / ranks / micro_batch), 1)
        return MicroBatches(_up(longest, unit), micro_batch, _in_rounds(count, layout.pp, layout.vpp))
    together = total.sum() ** 2 / np.square(total).sum() / len(total)  # 1: equal ones; attention pairs are as many
    mean_length = total.mean() / together
    if request.packing == "bins":
        shares = [share for batch in batches for share in np.array_split(batch.total, steps)]
        bins = [filled_bins(share, micro_batch * work.seq_len) for share in shares]
        count = math.ceil(np.mean([-(-len(members) // ranks) for members in bins]))
        rank_tokens = total.mean() * sequences / ranks
        if layout.pp > 1:
            rank_tokens = count * float(np.mean([members.max() for members in bins]))
        count = _in_rounds(max(count, 1), layout.pp, layout.vpp)
    else:
        longest = np.mean([share.max() for batch in batches for share in np.array_split(batch.total, steps)])
        # a step ends with the rank that has the longest sequence
        rank_tokens = max(total.mean() * sequences / ranks, longest)
        count = max(math.ceil(rank_tokens / (micro_batch * work.seq_len)), 1)
        count = _in_rounds(count, layout.pp, layout.vpp)
    micro_tokens = rank_tokens / count
    alike = max(round(micro_tokens / mean_length), 1)
    return MicroBatches(_up(max(round(micro_tokens / alike), 1), unit), alike, count)


def filled_bins(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Tokens of each bin that sequences are put into whole: the longest first, each into the first that has room.

    Of many sequences :data:`TOGETHER` at a time.
    """
    bins: list[np.ndarray] = []
    for chunk in np.array_split(lengths, -(-len(lengths) // TOGETHER)):
        filled = np.zeros(len(chunk), np.int64)
        for length in -np.sort(-chunk):
            filled[np.argmax(filled + length <= capacity)] += length
        bins.append(filled[filled > 0])
    return np.concatenate(bins)


def data_ranks(request: PostTrainRequest, devices: int) -> int:
    """Data ranks on so many GPUs. RequestError where the layout does not divide them."""
    layout = request.step.parallel
    of_copy = layout.tp * layout.pp * layout.cp
    if devices % of_copy:
        raise RequestError(
            f"parallel.tp={layout.tp} pp={layout.pp} cp={layout.cp} do not divide the {devices} GPUs that train"
        )
    return devices // of_copy


def _in_rounds(count: int, stages: int, chunks: int) -> int:
    """Micro-batches of an interleaved pipeline come in rounds of its stages."""
    return _up(count, stages) if chunks > 1 else count


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
