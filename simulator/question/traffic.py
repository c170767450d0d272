"""What is sent to a served model: when requests come, how long they are, what they share."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ...datasets.loading import check_fields, whole
from .canonical import RequestError
from .declaration import FILES, setting
from .request_classes import RequestClass, check_classes
from .unread import refuse_unread

ARRIVALS = ("poisson", "gamma", "constant", "bursty", "ramp", "daily", "closed")
LENGTHS = ("fixed", "uniform", "zipf", "normal", "lognormal", "empirical")
MOST_RANKED = 1 << 24  # lengths that zipf has weights of
TRACES = (
    *("auto", "columns", "azure", "splitwise", "mooncake", "vidur", "burstgpt", "sharegpt"),
    *("bench", "guidellm", "aiperf", "inference_perf", "log"),
)
MAY_LACK_TIMES = (".json", ".jsonl", ".ndjson")  # files that may have lengths alone: how requests come is said beside
OF_KIND = {  # kind of lengths -> the settings that it reads
    "fixed": ("mean",),
    "uniform": ("low", "high"),
    "zipf": ("low", "high", "exponent"),
    "normal": ("mean", "std", "low", "high"),
    "lognormal": ("mean", "std", "low", "high"),
    "empirical": ("values",),
}
# settings that one kind of arrivals alone reads
OF_ARRIVAL = {"cv": "gamma", "burst": "bursty", "rate_end": "ramp", "swing": "daily", "day_s": "daily"}
NOT_OF_TRACE = ("think_s", "input", "output")  # a trace has its own,
NOT_OF_TIMES = ("rate", *OF_ARRIVAL, "requests")  # and of these where it says when requests come


@dataclass(frozen=True)
class Lengths:
    """Tokens of prompts, or of answers.

    ``fixed`` at ``mean``; ``uniform`` from ``low`` to ``high``; ``zipf`` over the same, the shortest most often, with
    ``exponent``; ``normal`` and ``lognormal`` (a long tail) of ``mean`` and ``std``, cut at ``low`` and ``high``;
    ``empirical``: one of ``values``.
    """

    kind: str = setting("fixed", choices=LENGTHS)
    mean: float = setting(1024, least=1)
    std: float = 0.0
    low: int = setting(1, least=1)
    high: int = setting(4096, least=1)
    exponent: float = 1.1
    values: tuple[int, ...] = ()

    def check(self, name: str) -> None:
        """RequestError for what no tokens can be drawn from; ``name`` is what the setting is called."""
        check_fields(self, RequestError, name)
        if self.low > self.high:
            raise RequestError(f"{name}.low={self.low} is more than {name}.high={self.high}")
        if self.kind == "zipf" and self.high > MOST_RANKED:
            raise RequestError(f"{name}.high={self.high} must be at most {MOST_RANKED:,} for {name}.kind=zipf")
        if self.kind == "empirical" and not self.values:
            raise RequestError(f"{name}.kind=empirical needs {name}.values=[…], the lengths seen")
        for length in self.values:
            whole(RequestError, f"{name}.values", length, 1)
        usual_lengths = USUAL.get(name) or type(self)()
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            defaults: tuple[object, ...] = (field.default, getattr(usual_lengths, field.name), [])
            if field.name not in OF_KIND[self.kind] and value not in defaults:
                refuse_unread({f"{name}.{field.name}": value}, f"with {name}.kind={self.kind}")

    @property
    def average(self) -> float:
        """Tokens on average."""
        if self.kind == "uniform":
            return (self.low + self.high) / 2
        if self.kind == "empirical":
            return sum(self.values) / len(self.values)
        if self.kind == "zipf":
            import numpy as np

            ranks = np.arange(1, self.high - self.low + 2, dtype=float)
            weights = ranks**-self.exponent
            return float(self.low - 1 + (ranks * weights).sum() / weights.sum())
        return self.mean


USUAL = {
    "traffic.input": Lengths(),
    "traffic.output": Lengths(mean=128),
    "traffic.turn_input": Lengths(),
}


@dataclass(frozen=True)
class RequestTraffic:
    """The requests of a run.

    ``closed`` has no rate: clients send the next request when they have an answer. Of each prompt ``prefix_tokens`` are
    those of one of ``prefixes`` contents. The first ``warmup`` requests run, but their times and targets do not count.
    """

    arrival: str = setting("poisson", "poisson | gamma | constant | bursty | ramp | daily | closed", choices=ARRIVALS)
    rate: float = setting(1.0, "requests a second", positive=True)
    rate_end: float = setting(1.0, "of a ramp", positive=True)
    swing: float = setting(
        0.5, "of daily: the share of it that the rate is lower at first, and higher half a day later"
    )
    day_s: float = setting(86400.0, "and how long a day is", positive=True)
    cv: float = setting(2.0, "of gamma: how irregular gaps are", positive=True)
    burst: int = setting(10, "requests that come at once", least=1)
    concurrency: int = setting(0, "clients of a closed loop, or the most requests on their way; 0: no limit")
    in_step: bool = setting(
        False,
        "whether clients of a closed loop stay in step where all answers have one length, so that their prompts come "
        "together; false: they drift apart as real ones do, by up to a tenth more or fewer tokens an answer",
    )
    requests: int = setting(1000, "that are sent", least=1)
    warmup: int | None = setting(
        None, "the first of them, whose times do not count; null: none, and a tenth of capacity and sweep"
    )
    input: Lengths = setting(USUAL["traffic.input"], "fixed | uniform | zipf | normal | lognormal | empirical")
    output: Lengths = setting(USUAL["traffic.output"], "tokens of an answer, as those of a prompt")
    prefixes: int = setting(0, "contents that prompts begin with,")
    prefix_tokens: int = setting(0, "and their tokens")
    turns: int = setting(
        1, "of a session: each prompt begins with all that was said before; rate and requests count turns", least=1
    )
    turns_least: int | None = setting(
        None, "sessions have from so many turns up to turns; null: all have turns", least=1
    )
    turn_input: Lengths | None = setting(None, "new tokens of later turns, as a tool returns them; null: as input")
    think_s: float = setting(0.0, "between an answer and the next turn: a thought, or the time of a tool")
    think_cv: float = setting(0.0, "how irregular these pauses are: 0 all alike, 1 as by chance (gamma)")
    classes: tuple[RequestClass, ...] = setting(
        (),
        "that requests are of: [{name: chat, share: 3, priority: 0, ttft_ms: 500}, {name: batch, priority: 1}]; of a "
        "trace by its column class, where it has one",
    )
    trace: str | None = setting(
        None,
        "a file of requests: arrival_s, input_tokens, output_tokens[, prefix_id]; or one of the formats below; or "
        "azure_conversation_like | azure_code_like, which ship",
        http=FILES,
    )
    trace_format: str = setting(
        "auto",
        "auto | columns | azure | splitwise | mooncake | vidur | burstgpt | sharegpt | bench | guidellm | aiperf | "
        "inference_perf | log",
        choices=TRACES,
    )
    tokenizer: str | None = setting(
        None, "tokenizer.json that counts ShareGPT's texts; null: a quarter of their characters", http=FILES
    )
    speed: float = setting(1.0, "of a trace", positive=True)
    seed: int = setting(0, "of arrivals, lengths and routers")

    def __post_init__(self) -> None:
        check_fields(self, RequestError, "traffic")
        if (self.warmup or 0) >= self.requests and self.trace is None:
            raise RequestError(f"traffic.warmup={self.warmup} leaves none of traffic.requests={self.requests} to count")
        if self.swing >= 1:
            raise RequestError(f"traffic.swing={self.swing} must be a share below 1, of the mean rate")
        self.input.check("traffic.input")
        self.output.check("traffic.output")
        if self.arrival == "closed" and self.concurrency == 0:
            raise RequestError("traffic.arrival=closed needs traffic.concurrency, the clients that send requests")
        if self.prefix_tokens and not self.prefixes:
            raise RequestError("traffic.prefix_tokens needs traffic.prefixes, how many contents there are")
        if self.prefixes and not self.prefix_tokens:
            raise RequestError(f"traffic.prefixes={self.prefixes} needs traffic.prefix_tokens, how long they are")
        if self.trace is None and self.speed != 1:
            raise RequestError(f"traffic.speed={self.speed} is of a trace: traffic.rate says how many requests come")
        if self.trace is not None and (self.prefixes or self.turns > 1):
            raise RequestError("traffic.turns and traffic.prefixes make requests: a trace has its own")
        if self.turns > 1 and self.concurrency:
            raise RequestError("traffic.turns does not go with traffic.concurrency: a session waits for its answers")
        self._check_sessions()
        check_classes(self.classes)
        self._check_read()

    def _check_sessions(self) -> None:
        for name, none in (("turns_least", None), ("turn_input", None), ("think_cv", 0.0)):
            if self.turns == 1 and getattr(self, name) != none:
                raise RequestError(f"traffic.{name} is of sessions: traffic.turns says how many turns they have")
        if self.turns_least is not None and self.turns_least > self.turns:
            raise RequestError(f"traffic.turns_least={self.turns_least} is more than traffic.turns={self.turns}")
        if self.turn_input is not None:
            self.turn_input.check("traffic.turn_input")

    @property
    def mean_turns(self) -> float:
        """Turns of a session on average."""
        return self.turns if self.turns_least is None else (self.turns_least + self.turns) / 2

    def _check_read(self) -> None:
        """RequestError for a setting that is not the usual one and that nothing would read."""
        defaults = {field.name: field.default for field in fields(self)}
        names = {name for name, value in defaults.items() if getattr(self, name) != value}
        if self.trace is not None:
            _check_lengths(names)
            if not self.trace.endswith(MAY_LACK_TIMES):
                return  # its times are its own: check_own_arrivals once it is read
        elif self.tokenizer is not None:
            raise RequestError(f"traffic.tokenizer={self.tokenizer} is of a file: name it as traffic.trace=FILE")
        for name, kind in OF_ARRIVAL.items():
            if name in names and self.arrival != kind:
                raise RequestError(f"traffic.{name}={getattr(self, name)} is of traffic.arrival={kind}: leave it out")
        if "in_step" in names and (self.arrival != "closed" or self.output.kind != "fixed"):
            raise RequestError(
                "traffic.in_step=true is of clients whose answers have one length: it goes with traffic.arrival=closed "
                "and traffic.output.kind=fixed"
            )
        if self.arrival == "closed" and "rate" in names:
            raise RequestError(
                f"traffic.rate={self.rate} is not read with traffic.arrival=closed: its clients send when they have an "
                "answer; leave it out, or take poisson"
            )
        if self.trace is not None:
            return
        if "trace_format" in names:
            raise RequestError(f"traffic.trace_format={self.trace_format} is of a file: name it as traffic.trace=FILE")
        if "think_s" in names and self.turns == 1:
            raise RequestError(f"traffic.think_s={self.think_s} is between turns: traffic.turns says how many")


def check_own_arrivals(traffic: RequestTraffic) -> None:
    """RequestError for settings that say how requests come, beside a trace that says it."""
    defaults = {field.name: field.default for field in fields(traffic)}
    for name in NOT_OF_TIMES:
        if getattr(traffic, name) != defaults[name]:
            raise RequestError(f"traffic.{name} makes requests: a trace has its own, leave it out")
    if traffic.arrival not in (defaults["arrival"], "closed"):
        raise RequestError(f"traffic.arrival={traffic.arrival} is not read: a trace says when requests come")


def _check_lengths(names: set[str]) -> None:
    for name in NOT_OF_TRACE:
        if name in names:
            raise RequestError(f"traffic.{name} makes requests: a trace has its own, leave it out")
