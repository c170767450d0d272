"""Which ways to serve the event loop plays: those that may be best by their closed forms, then what lies near the best.

Rows that were played have the event loop's load and times; what the closed form said of their rate stays beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median
from typing import Any

from ...serving.capacity import between
from ...serving.confidence import chance_of_p99
from ..objectives import OF_SERVING
from ..rank import Row, ranked
from .estimate import with_load
from .kept import PlayedWays
from .played import PRECISION, can_play, figures_at, highest_rate, part_of
from .replicas import Replicas
from .request import CHANCE, OF_POINT, OF_PREFILL, ServedSearchRequest

OF_LOAD = ("tokens_per_s_per_gpu", "tokens_per_s", "goodput", "token_cost", "hourly_cost", "gpus")
WAYS = 16  # that are played at most, unless more are asked for
OPTIMISM = 1.03  # by how much the event loop may serve more than the closed form of a way that is not played
NEAR = (0.8, 1.25)  # batches beside that of the best
SIZINGS = 3  # of a way for the rate asked for
SEEDS = (1, 2, 3, 4)  # of the requests of more runs, beside the first
TIED, SURE, NEARBY = 1.04, 4, 1.03  # rows so near the best, at most so many, whose rates lie so near each other
OF_PLAYED = ("confirmed", "closed_form_rate")  # what rows that were played have besides
BETTER = 1 / PRECISION  # how near a row that is tried must come for its rate to be looked for
Again = Callable[[Row, Mapping[str, Any], float | None], Row]
Likeness = Callable[[Row], tuple[Any, ...]]  # rows of one value are alike


def plays(request: ServedSearchRequest) -> bool:
    """Whether the event loop says how much each of the best serves: users expect something, and the first objective
    is about load."""
    play = can_play() if request.confirm is None else request.confirm > 0
    return play and request.slo.named and request.objectives[0] in (*OF_LOAD, CHANCE)


@dataclass(frozen=True)
class Shortlist:
    """The ways of one search that are played; ``again`` makes the row of a way with another batch, or sized anew,
    ``interval`` says how much faster and slower than said a row's iterations may be, ``kept`` has what was played.
    Runs with other requests take ``threads`` at a time: the compiled event loop holds no lock of Python."""

    request: ServedSearchRequest
    replicas: Replicas
    again: Again
    interval: Callable[[Row], tuple[float, float]]
    kept: PlayedWays
    threads: int = 1

    def played(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """The rows, those that were played as the event loop has them, and rows near the best that are new."""
        most = self.request.confirm or WAYS
        if self.request.objectives[0] == CHANCE:
            return [dict(row) for row in self._with_chances(rows, most)]
        tried: dict[tuple[Any, ...], Row] = {}
        by_key = {key_of(row): row for row in rows}
        while len(tried) < most and (row := self._next(by_key, tried)):
            best = self._best(tried)
            least = BETTER * best["requests_per_s"] if best else 0.0
            tried[key_of(row)] = self._play(row, least)
            if (roomier := self._roomier(row, tried)) and key_of(roomier) not in tried:
                tried[key_of(roomier)] = self._play(roomier, least)
            if len(tried) == most or self._next(by_key, tried) is None:
                by_key |= {key_of(near): near for near in self._near(self._best(tried)) if key_of(near) not in by_key}
        tried |= self._surer(tried)
        best = self._best(tried)
        others = self._corrected(by_key, tried, (chunk_of, kind_of, prompts_of, all_alike), median)
        others = {key: self._behind(row, best) for key, row in others.items() if key not in tried}
        return [dict(row) for row in (tried | others).values()]

    def _behind(self, row: Row, best: Row | None) -> Row:
        """A row that was not played, said to be no better than the best that was: not with as many GPUs either."""
        figure, sign, *_ = OF_SERVING[self.request.objectives[0]]
        if best is None or not row["meets_slo"]:
            return row
        times = {"rate": row["requests_per_s"], "ttft_ms": row["ttft_ms"], "tpot_ms": row["tpot_ms"]}
        if figure not in ("devices", "hourly_cost"):
            times["rate"] *= min((row[figure] / best[figure]) ** sign / PRECISION, 1.0)
        elif row[figure] == best[figure] and ranked([best, row], self.request.objectives)[0] is row:
            times |= {name: max(row[name], best[name]) for name in ("ttft_ms", "tpot_ms")}
        else:
            return row
        return with_load(self.request, row, times)

    def _with_chances(self, rows: Sequence[Row], most: int) -> Iterator[Row]:
        """The rows, those ways that serve most by their closed forms with how likely they keep the rate asked for."""
        kinds: dict[tuple[Any, ...], Row] = {}
        for row in sorted(self.request.good(rows), key=lambda row: -row["requests_per_s"]):
            kinds.setdefault(kind_of(row), row)
        chosen = {id(row) for row in [*kinds.values()][:most]}
        for row in rows:
            yield {**row, **self.kept.of(asked(row), partial(self._chance, row))} if id(row) in chosen else row

    def _chance(self, row: Row) -> dict[str, Any]:
        """How likely the 99th percentile of TTFT is as expected at the rate asked for, by other seeds of the requests
        and by the interval of the steps."""
        rate, most_ms = self.request.rate, self.request.slo.ttft_ms
        assert rate is not None
        assert most_ms is not None
        parts = [part_of(self.request, row, self.replicas, seed) for seed in (0, *SEEDS)]
        fast, slow = (parts[0].slower(factor).at(rate) for factor in self.interval(row))
        seeds = [part.at(rate) for part in parts]
        chance = chance_of_p99(seeds, fast, slow, most_ms)
        return {"p_p99_ttft_met": chance, "confirmed": figures_at(parts[0], rate)}

    def _next(self, by_key: Mapping[tuple[Any, ...], Row], tried: Mapping[tuple[Any, ...], Row]) -> Row | None:
        """The row to play next: of those that may be better than all that were played the best by what is known of it,
        None where no one may. A way of which no batch was played with this chunk may be by more than its closed form
        says."""
        kinds = {chunk_of(row) for row in tried.values()}
        possible = self._corrected(by_key, tried, (chunk_of,))
        best = self._best(tried)
        likely = self._corrected(by_key, tried, (chunk_of, prompts_of))
        waiting = [row for key, row in likely.items() if key not in tried]
        for row in ranked(self.request.good(waiting), self.request.objectives):
            optimism = 1.0 if chunk_of(row) in kinds else OPTIMISM
            if best is None or self._may_beat(possible[key_of(row)], best, optimism):
                return by_key[key_of(row)]
        return None

    def _may_beat(self, row: Row, best: Row, optimism: float) -> bool:
        """Whether a row may be better than the best by so much more than is said of it."""
        figure, sign, *_ = OF_SERVING[self.request.objectives[0]]
        if figure in ("devices", "hourly_cost"):
            return bool(row[figure] < best[figure])
        return bool(sign * row[figure] * optimism**-sign < sign * best[figure])

    def _best(self, tried: Mapping[tuple[Any, ...], Row]) -> Row | None:
        order = ranked(self.request.good(list(tried.values())), self.request.objectives)
        return order[0] if order else None

    def _near(self, best: Row | None) -> list[Row]:
        """The best with other batches, where any may be."""
        if best is None or self.request.space.batch or self.request.confirm is not None:
            return []
        batches = [{"batch": max(round(best["batch"] * factor), 1)} for factor in NEAR]
        near = (self.again(best, change, self.request.size_for) for change in batches)
        return [row for row in near if row]

    def _roomier(self, row: Row, tried: Mapping[tuple[Any, ...], Row]) -> Row:
        """A row that was played with twice its batch, where it would be the best if it served what its closed form
        says, and serves less: more run in a crowd than the closed form allows for. Else empty."""
        if self.request.space.batch or self.request.rate is not None or self.request.confirm is not None:
            return {}
        played, best = tried[key_of(row)], self._best(tried)
        enough = played["requests_per_s"] * OPTIMISM >= row["requests_per_s"] and played["meets_slo"]
        if enough or (best is not None and not self._may_beat(row, best, 1.0)):
            return {}
        return self.again(row, {"batch": 2 * row["batch"]}, None)

    def _surer(self, tried: Mapping[tuple[Any, ...], Row]) -> dict[tuple[Any, ...], Row]:
        """Those as good as the best but for chance, with the mean rate of several runs of other requests."""
        best = self._best(tried)
        if best is None or self.request.rate is not None:
            return {}
        least = best["requests_per_s"] / TIED
        near = [row for row in tried.values() if row["meets_slo"] and row["requests_per_s"] >= least]
        by_key: dict[tuple[Any, ...], Row] = {}
        for row in ranked(near, self.request.objectives)[:SURE]:
            rate = row["requests_per_s"]
            rates = (rate, *self.kept.of(["surer", *asked(row)], partial(self._other_rates, row)))
            interval = between(rates)
            times = {**row["confirmed"], "rate": fmean(rates), "interval": interval, "rates": rates}
            by_key[key_of(row)] = with_load(self.request, row, times) | {"confirmed": times}
        return by_key

    def _other_rates(self, row: Row) -> list[float]:
        """The highest rates of a row with other requests."""
        own = row["requests_per_s"]
        parts = [part_of(self.request, row, self.replicas, seed) for seed in SEEDS]
        with ThreadPoolExecutor(self.threads) as pool:
            return [*pool.map(lambda part: highest_rate(part, own, own / 2, NEARBY), parts)]

    def _corrected(
        self,
        by_key: Mapping[tuple[Any, ...], Row],
        tried: Mapping[tuple[Any, ...], Row],
        likenesses: Sequence[Likeness],
        share_of: Callable[[list[float]], float] = max,
    ) -> dict[Any, Row]:
        """Rows that were not played, as much slower than their closed forms as those most like them were: those that
        are alike by the first of some likenesses by which any are."""
        shares: list[dict[Any, list[float]]] = [{} for _ in likenesses]
        for row in tried.values():
            if row["meets_slo"]:
                share = row["requests_per_s"] / row["closed_form_rate"]
                for known, likeness in zip(shares, likenesses, strict=True):
                    known.setdefault(likeness(row), []).append(share)
        changed = {}
        for key, row in by_key.items():
            changed[key] = row
            if not row["meets_slo"]:
                continue
            pairs = zip(shares, likenesses, strict=True)
            alike = next((known[likeness(row)] for known, likeness in pairs if likeness(row) in known), [1.0])
            share = min(share_of(alike), 1.0)
            if share < 1:
                times = {"rate": share * row["requests_per_s"], "ttft_ms": row["ttft_ms"], "tpot_ms": row["tpot_ms"]}
                changed[key] = with_load(self.request, row, times)
        return changed

    def _play(self, row: Row, least: float) -> Row:
        """A row with the load that the event loop finds; ``least`` is the least that is of use."""
        played_row = self._at_load(row, least)
        for _ in range(SIZINGS):
            rate = self.request.rate
            if rate is None or not played_row["requests_per_s"] or self.request.space.ratio:
                return played_row
            other = self.again(row, {}, rate * played_row["closed_form_rate"] / played_row["requests_per_s"])
            if not other or (key_of(other) == key_of(played_row) and other["devices"] == played_row["devices"]):
                return played_row
            enough = played_row["requests_per_s"] >= rate
            sized = self._at_load(other, 0.0)
            if enough and (sized["requests_per_s"] < rate or sized["devices"] >= played_row["devices"]):
                return played_row
            played_row = sized
        return played_row

    def _at_load(self, row: Row, least: float) -> Row:
        return self.kept.of([*asked(row), least], partial(self._loaded, row, least))

    def _loaded(self, row: Row, least: float) -> Row:
        part = part_of(self.request, row, self.replicas)
        rate = highest_rate(part, row["requests_per_s"], least)
        own = {**row, "closed_form_rate": row["requests_per_s"]}
        if not rate:
            return {**own, "meets_slo": False, "goodput": 0.0, "confirmed": figures_at(part, row["requests_per_s"])}
        found = figures_at(part, rate)
        return with_load(self.request, own, found) | {"confirmed": found}


def kind_of(row: Row) -> tuple[Any, ...]:
    """What tells a way from others, whatever its batch and chunk."""
    return tuple(row[name] for name in OF_POINT if name not in ("batch", "max_tokens"))


def chunk_of(row: Row) -> tuple[Any, ...]:
    """What tells a way with its chunk from others, whatever its batch."""
    return (*kind_of(row), row["max_tokens"])


def prompts_of(row: Row) -> tuple[Any, ...]:
    """How prompts are taken: by which replicas, in which chunks, and beside decoding or apart from it."""
    where = (row["prefill_cluster"], *(row[name] for name in OF_PREFILL)) if row["pools"] == "apart" else kind_of(row)
    return (row["pools"], row["policy"], row["cluster"], row["max_tokens"], *where)


def all_alike(row: Row) -> tuple[Any, ...]:
    """No difference between rows."""
    return ()


def asked(row: Row) -> list[Any]:
    """What the event loop is asked of a row: a way, how many GPUs it has, and near which load to look."""
    return [*key_of(row), row["devices"], row["requests_per_s"]]


def key_of(row: Row) -> tuple[Any, ...]:
    """What tells a way from others."""
    return tuple(row[name] for name in OF_POINT)
