"""Everything that an event loop of :mod:`.loop` reads and writes: requests in slots, ranks, lanes, counts.

A *slot* holds one request from its arrival to its end, and is then used again. A *rank* is one scheduler with its own
KV memory; a *replica* is one rank, or several that run in lockstep (attention data parallelism). A *lane* is one batch
that a replica has in flight: as many as it has pipeline stages; each rank has its part of it, a *batch*. All times are
in microseconds.

Records are arrays of structures: compiled code reads them in place, plain Python as objects (:func:`as_objects`).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

NONE = -1


def _kind(integers: str, real: str) -> np.dtype:
    """A record with these whole numbers and these real ones."""
    return np.dtype([(name, np.int64) for name in integers.split()] + [(name, np.float64) for name in real.split()])


SLOT = _kind(
    # `shared` tokens have the content `prefix` (NONE: like no other's), or those of LoopState.keys from `keys` on.
    "request row prefix shared keys hit "
    # first_rank: where it came in. to: where its cache goes, with so many blocks (landing) taken there; landed: it
    # waits with them. back: it waits without any, because it was preempted. parts: of its row of the table.
    # stalled: its cache is in host memory. free: a stack of free slots. limit: why it was rejected (:mod:`.limits`).
    "preempted stalled first_rank to landing landed back seat parts next free limit "
    # kind: its class, and that one's priority. work: tokens to compute that it came to its first rank with.
    "kind priority work "
    # adapter: NONE for the model itself. refused: it waited for a place for its adapter.
    "adapter refused "
    # tiered: tokens that it finds below the GPU, below: those of them below host memory, far: in the shared store
    # alone. kept: full blocks that are written to tiers.
    "tiered below far kept "
    # What every iteration reads of every request stands side by side, up to last_us: machine code waits for memory.
    # loading: tokens that it will have once they are loaded. scheduled: its tokens in the last batch that it was put
    # into. Tokens that are computed have their keys and values cached, or are in a batch in flight; made are generated
    # ones, of which the last is in no cache yet. waits: a batch in flight gives it a token.
    "rank loading scheduled waits input output computed made blocks",
    # prefilled_us: its prompt was computed; first_us: the client has its first token.
    "last_us first_us prefilled_us arrival_us admitted_us moved_us "
    # before_us: since it was sent until it arrived here. encoder_us: that its first iteration takes longer.
    "before_us encoder_us",
)
RANK = _kind(
    # free: blocks. head, tail: of its queue. count: requests that run. outstanding: routed here and not ended. work:
    # tokens that they have still to compute. clock: decodes since it last tried prompts. rows: of a static batch.
    # peak: most blocks in use. seats: rows of the block table that are free. moves, last_move: ends of the line of
    # caches that wait for its blocks. landed, back: how many wait with blocks, and without any because of preemption.
    # swapped_out, swapped_in: tokens whose cache went to host memory or came from there since the last iteration.
    # held: its prompts wait for those of other ranks. apart, gathered: iterations that a replica's prompts have waited
    # until each rank has one, and since (of its first rank). again: its batch may come again (:mod:`.repeating`), in
    # which refused stays first of those that wait; repeated: it came again so often, and may so many times (left) more.
    # full: SGLang tries no prompt until a request leaves; rows are then those that ran when it last looked.
    "free head tail waiting count outstanding work clock rows peak seats moves last_move landed back "
    "swapped_out swapped_in held apart gathered again refused repeated left full "
    # prompt_tokens: of requests routed here that have no first token yet.
    # shut: it takes no requests (:mod:`.fleet`).
    "prompt_tokens shut "
    # formed: batches so far. adapters: of all that run (:mod:`.adapters`). passed: from the head of the queue to it all
    # wait for a place for their adapters.
    "formed adapters passed "
    # bare: free blocks without content. runs: so many were ever in use, spare: a stack of those that are free again.
    "bare runs spare "
    # steps: iterations so far, of a replica's first rank where experts are uneven (:mod:`.uneven`).
    "steps "
    # fresh: of those that wait, that came in since its iteration began. told, known: requests as it last told how many
    # wait and run, and as vLLM's balance of ranks knows it (:mod:`.counted`).
    "fresh told_waiting told_running known_waiting known_running",
    # ratio: SGLang's estimate. extra_us: what its next iteration takes longer. visible_us: requests that arrived later
    # are not seen yet; polled_us: the same when SGLang last looked for any. link_us: when its link is free, in_us: the
    # link into it. busy_us: that it computed. given_us: when a batch that repeats last gave tokens.
    # sent_us: when its server will have sent all tokens so far to clients
    "ratio extra_us visible_us polled_us link_us in_us busy_us given_us sent_us "
    # load_us: what its next iteration loads layer by layer. remote_us: when its way to the shared store is free.
    "load_us remote_us",
)
# status: of :mod:`.fleet`. seed: of its failures, rate: of them in a microsecond. since_us, down_since_us: when it was
# turned on and failed; on_us, down_us: how long it was so before. ready_us: when it takes requests, if nothing happens.
FLEET = _kind("status seed failures starts", "rate since_us on_us down_since_us down_us ready_us")
LANE = _kind("busy", "start_us stage_us")  # stage_us: when the stage of this number is free
# given_us: when clients have its tokens. adapter_us: what its adapters add to its time.
BATCH = _kind(
    "size",
    "decodes decode_context prefill_tokens prefill_pairs prefill_context samples given_us adapters adapter_us",
)
RUN = np.dtype(
    [("last", np.int64), *((name, np.int32) for name in ("count", "users", "known", "rest", "after", "before", "next"))]
)
"""Blocks of contents up to ``last`` (:mod:`.blocks`). Free ones form a ring, in the order in which they are taken. As
small as can be: there may be millions."""
DUE_LATER = _kind("code", "time_us")
# used, evicted: blocks. loads, tokens: read from it. link_us: when its link is free; a load takes first_us, and
# token_us for each token.
SHELF = _kind("blocks used evicted loads tokens", "link_us first_us token_us")
SPAN = _kind("iterations", "busy_us decodes prefill_tokens blocks waiting")  # sums, weighted by time but for tokens
SIZED = _kind("iterations", "busy_us tokens_us")  # iterations of like size: their time, and tokens times it
ITERATION = _kind(
    "rank lane blocks waiting swapped_out swapped_in", "start_us end_us decodes prefill_tokens decode_context samples"
)
ENDED = _kind(
    "request rank prefill_rank input_tokens output_tokens preemptions hit_tokens limit kind adapter",
    "arrival_us admitted_us prefilled_us first_token_us finish_us moved_us",
)
TOTALS = _kind(
    "free_slots left logged due arrived completed rejected iterations "
    "preemptions swaps input_tokens output_tokens "
    "hit_tokens computed_tokens moved_tokens guesses guessed credits waiting seed turn decode_turn key_tokens "
    # ordered: queues are in order of priority. bucket: requests that a gateway would let in at bucket_us.
    # held: requests that no replica takes, held_first to held_last. begun: the fleet is open. paused: an autoscaler
    # looks, and the loop goes on at a row of the chunk. fleet_due: of what is due that of the fleet. failed: requests.
    "ordered held held_first held_last begun paused desired row fleet_due failed lost_requests lost_tokens "
    # most_adapters: on a GPU. adapter_waits: requests that one of them kept waiting.
    "most_adapters adapter_waits adapter_loads adapter_reads rebalances "
    # places: of shelves that were ever in use, spare: a stack of those that are free again. buckets: of their table.
    "places spare buckets "
    # told: ranks told of requests, which vLLM's balance of ranks knows from told_us on.
    "told",
    "now_us gone_us width_us gaps gap_us least_gap_us most_gap_us bucket bucket_us loads load_us "
    "adapter_load_us adapters_used uneven uneven_us rebalance_us told_us",
)


class LoopState(NamedTuple):
    """All of it. Two-dimensional records are laid out flat: rank by rank, lane by lane."""

    slots: Any  # SLOT [slots]
    ranks: Any  # RANK [ranks]
    running: np.ndarray  # [ranks, seats] slots in the order in which they are served
    order: np.ndarray  # [ranks, seats + 1] slots, for lightllm's sums
    growing: np.ndarray  # [ranks, tokens of a block] requests that take a block, by iteration of a batch that repeats
    lanes: Any  # LANE [replicas * stages]
    batches: Any  # BATCH [lanes * ranks of a replica]
    entries: np.ndarray  # [batches, seats] slots; -1 - slot where the entry yields no token
    tree: np.ndarray  # ends of all lanes, a tree of minima (:mod:`.lanes`)
    runs: Any  # RUN [ranks * (blocks + 1)], the last of a rank is the end of its ring; empty without prefix caching
    table: np.ndarray  # [ranks, seats, blocks of a request, 2] runs, and how many blocks of each and of its rest
    seats: np.ndarray  # [ranks, seats] those free, a stack
    found: np.ndarray  # [ranks, size] run + 1 by the hash of its contents; 0: none
    keys: np.ndarray  # contents of spans of ``key_tokens`` tokens, of all requests that come with them
    totals: Any  # TOTALS [1]
    gaps: np.ndarray  # [bins] times between tokens (:mod:`.histogram`)
    spans: Any  # SPAN [pools * spans]
    sizes: Any  # SIZED [pools * 2 * SIZES], those of decodes alone, then those with prompts, by powers of two of tokens
    log: Any  # ITERATION [rows], as far as they are kept
    left: Any  # ENDED [slots] requests that ended, until they are fetched
    due: Any  # DUE_LATER [2 * slots] a heap of what comes in later
    shelves: Any  # SHELF [ranks * OWN_TIERS + 1]; empty without tiers
    places: np.ndarray  # [places, 6] of blocks on shelves (:mod:`.tiers`)
    shelved: np.ndarray  # [buckets] place + 1 by the hash of its contents; 0: none
    fleet: Any  # FLEET [replicas]; empty where none comes or goes
    classes: np.ndarray  # [classes, limits] requests that each limit rejected (:mod:`.limits`), first the priority
    adapters: np.ndarray  # [ranks, adapters, 4] (:mod:`.adapters`); empty without any
    adapter_places: np.ndarray  # [ranks, places] adapter + 1 on the GPU, then in host memory


RECORDS = (
    *("slots", "ranks", "lanes", "batches", "runs", "totals", "spans", "sizes", "log", "left", "due", "shelves"),
    "fleet",
)
NUMBERS = ("tree", "gaps")  # of one dimension, that every iteration reads or writes
SIZES = 24  # powers of two of tokens in a batch
LIMITS = 9  # codes of :mod:`.limits`
OWN_TIERS = 2  # of a rank, before the one that all share (:mod:`.tiers`)
PLACE = 6  # numbers of a place on a shelf (:mod:`.tiers`)
BUCKETS = 1024  # of the table of shelves at first


@dataclass(frozen=True)
class StateSizes:
    """How large the arrays are."""

    replicas: int
    ranks_per_replica: int
    stages: int
    seats: int  # requests that run at a time on a rank
    blocks: int
    caching: bool = False
    most_blocks: int = 1  # of one request, where prefixes are cached
    pools: int = 1
    spans: int = 256
    logged: int = 0
    bins: int = 1
    decoders: int = 0  # of the replicas those that only decode,
    decode_ranks: int = 1  # each with so many ranks
    block_tokens: int = 16
    classes: int = 1
    tiers: tuple[int, ...] = ()  # blocks of host memory, drives, and the shared store
    changing: bool = False  # replicas come and go,
    starts: int = 0  # and so often may one be about to start
    adapters: int = 0
    adapter_places: int = 0  # of a rank, on the GPU and in host memory

    @property
    def rows(self) -> int:
        """Rows of a rank's block table: of all that run, and where caches move to a pool as many on their way."""
        return self.seats * self.pools if self.caching else 0

    @property
    def ranks(self) -> int:
        """Schedulers in all."""
        return (self.replicas - self.decoders) * self.ranks_per_replica + self.decoders * self.decode_ranks

    @property
    def batches(self) -> int:
        """Batches of ranks in flight at most."""
        return self.lanes * max(self.ranks_per_replica, self.decode_ranks if self.decoders else 1)

    @property
    def lanes(self) -> int:
        """Batches in flight at most."""
        return self.replicas * self.stages


def empty_state(shape: StateSizes, slots: int, seed: int = 0) -> LoopState:
    """The state before the first request."""
    from .lanes import tree_of

    ranks = np.zeros(shape.ranks, RANK)
    ranks["free"], ranks["head"], ranks["tail"], ranks["ratio"] = shape.blocks, NONE, NONE, -1.0
    ranks["visible_us"], ranks["moves"], ranks["passed"] = np.inf, NONE, NONE
    ranks["bare"], ranks["spare"] = shape.blocks, NONE
    totals = np.zeros(1, TOTALS)
    totals["free_slots"], totals["width_us"], totals["least_gap_us"] = slots, 1000.0, np.inf
    totals["seed"] = 1 + seed % 2147483646
    totals["places"], totals["spare"], totals["buckets"] = shape.ranks * OWN_TIERS + 1, NONE, BUCKETS
    batches = shape.batches
    ranks["seats"] = shape.rows
    records = np.zeros(slots, SLOT)
    records["free"] = np.arange(slots)[::-1]
    return LoopState(
        slots=records,
        ranks=ranks,
        running=np.zeros((shape.ranks, shape.seats), np.int64),
        order=np.zeros((shape.ranks, shape.seats + 1), np.int64),
        growing=np.zeros((shape.ranks, shape.block_tokens), np.int64),
        lanes=np.zeros(shape.lanes, LANE),
        batches=np.zeros(batches, BATCH),
        entries=np.zeros((batches, shape.seats), np.int64),
        tree=tree_of(shape.lanes),
        runs=_rings(shape),
        table=np.zeros((shape.ranks, shape.rows, shape.most_blocks if shape.caching else 0, 2), np.int32),
        seats=np.tile(np.arange(shape.rows)[::-1], (shape.ranks, 1)),
        found=np.zeros((shape.ranks, _buckets(shape)), np.int32),
        keys=np.zeros(0, np.int64),
        totals=totals,
        gaps=np.zeros(shape.bins, np.int64),
        spans=np.zeros(shape.pools * shape.spans, SPAN),
        sizes=np.zeros(shape.pools * 2 * SIZES, SIZED),
        log=np.zeros(shape.logged, ITERATION),
        left=np.zeros(slots, ENDED),
        due=np.zeros(2 * slots + 1 + shape.replicas * (shape.starts + 3) * shape.changing, DUE_LATER),
        fleet=np.zeros(shape.replicas * shape.changing, FLEET),
        classes=np.zeros((shape.classes, LIMITS), np.int64),
        adapters=np.zeros((shape.ranks if shape.adapters else 0, shape.adapters, 4), np.int64),
        adapter_places=np.zeros((shape.ranks, shape.adapter_places), np.int64),
        **_shelves(shape),
    )


def _buckets(shape: StateSizes) -> int:
    """Of the table of contents of a rank: a power of two, one for two to four blocks."""
    return 1 << (shape.blocks // 4).bit_length() if shape.caching else 1


def _rings(shape: StateSizes) -> np.ndarray:
    """Each ring holds its end alone. Memory of runs that are never used is never touched."""
    if not shape.caching:
        return np.zeros(0, RUN)
    width = shape.blocks + 1
    runs, ends = np.zeros(shape.ranks * width, RUN), np.arange(1, shape.ranks + 1) * width - 1
    runs["after"][ends] = runs["before"][ends] = ends
    return runs


def _shelves(shape: StateSizes) -> dict[str, np.ndarray]:
    """Empty tiers: each ring holds its end alone. Memory of places that are never used is never touched."""
    count = shape.ranks * OWN_TIERS + 1 if any(shape.tiers) else 0
    if count == 0:
        return {"shelves": np.zeros(0, SHELF), "places": np.zeros((0, PLACE), np.int64), "shelved": np.zeros(0, int)}
    shelves = np.zeros(count, SHELF)
    shelves["blocks"] = [*shape.tiers[:OWN_TIERS] * shape.ranks, shape.tiers[OWN_TIERS]]
    most = count + int(shelves["blocks"].sum())
    places = np.zeros((most, PLACE), np.int64)
    places[:count, 3] = places[:count, 4] = np.arange(count)
    return {"shelves": shelves, "places": places, "shelved": np.zeros(max(BUCKETS, 4 << most.bit_length()), np.int64)}


def with_room(state: LoopState, slots: int) -> LoopState:
    """The state with so many free slots at least, and room for as many requests that end."""
    have, free = len(state.slots), int(state.totals["free_slots"][0])
    if free >= slots:
        return state
    more = max(slots - free, have)
    state.totals["free_slots"] = free + more
    grown = _longer(state.slots, more)
    grown["free"][: free + more] = np.concatenate([np.arange(have, have + more)[::-1], state.slots["free"][:free]])
    return state._replace(slots=grown, left=_longer(state.left, more), due=_longer(state.due, 2 * more))


def _longer(records: np.ndarray, more: int) -> np.ndarray:
    return np.concatenate([records, np.zeros(more, records.dtype)])


def as_objects(state: LoopState) -> LoopState:
    """The state with a list of objects in place of each array of records: what plain Python reads fastest."""
    lists: Any = {name: _objects(getattr(state, name)) for name in RECORDS}
    lists |= {name: getattr(state, name).tolist() for name in NUMBERS}
    return state._replace(**lists | {"table": state.table.data, "found": state.found.data})


def as_lists(columns: Any) -> Any:
    """A named tuple with a list in place of each array, in those within it too; one of two dimensions as a view."""
    if isinstance(columns, np.ndarray):
        return columns.tolist() if columns.ndim == 1 else np.ascontiguousarray(columns).data
    return type(columns)(*map(as_lists, columns)) if hasattr(columns, "_fields") else columns


def _objects(records: np.ndarray) -> list[SimpleNamespace]:
    names = records.dtype.names or ()
    return [SimpleNamespace(**dict(zip(names, values, strict=True))) for values in records.tolist()]


def write_back(objects: LoopState, state: LoopState) -> None:
    """Copy what :func:`as_objects` made, and a loop has changed, into the arrays it was made from."""
    counts = {"log": objects.totals[0].logged, "left": objects.totals[0].left}  # the loop writes these rows alone
    for name in RECORDS:
        count = counts.get(name)
        getattr(state, name)[:count] = [tuple(vars(record).values()) for record in getattr(objects, name)[:count]]
    for name in NUMBERS:
        getattr(state, name)[:] = getattr(objects, name)
