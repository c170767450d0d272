"""Served traffic in Python: :func:`serving`, and the questions that play traffic many times, as ``opcast.serving`` …"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..datasets.devices import Device
from ..simulator.search.spread import Crew
from .api import asked

if TYPE_CHECKING:
    from ..simulator.question.serving import ServingRequest
    from ..simulator.report.served import ServingReport
    from ..simulator.serving.capacity import Capacity
    from ..simulator.serving.caps import ServedCap
    from ..simulator.serving.comparison import WayOfServing
    from ..simulator.serving.step_latency import StepLatency
    from ..simulator.trace import Model


def serving(
    model: Model | ServingRequest | None = None,
    device: str | Device | None = None,
    *,
    requests: str | Path | None = None,
    home: str | Path | None = None,
    **settings: Any,
) -> ServingReport:
    """What comes of traffic on the replicas of a served model.

    ``settings`` are those that ``opcast serving --help`` lists, with the same defaults: ``traffic``, ``scheduler``,
    ``kv``, ``slo``, ``decode_pool``, ``speculation``, ``lora``, ``eplb``, ``images`` and ``afd`` are mappings, ``law``
    gives iteration times by hand, in place of a model; ``replicas``, ``router``, ``intervals``, …; ``engine`` is one as
    it is started, with its own ``args``, and ``calibrate`` its start-up log. Beside them stand those of
    :func:`.api.simulate` that say what a replica is: ``cluster``, ``nodes``, ``tp``, ``pp``, ``stack``, ``precision``,
    … A :class:`ServingRequest` has all. ``requests`` is a file that every request is written to as a row of Parquet.

    Raises RequestError, KvError where the model leaves no KV memory, BadInputError for a file that cannot be read or
    written, ServingEngineError for bad arguments, and the errors of :func:`.api.simulate`.
    """
    bench, request = asked("serving", model, {"device": device, **settings}, home)
    if requests is None:
        return bench.serving(request).report
    from ..simulator.serving.serve import Keeping
    from .serving import write_rows
    from .writing import check_place

    check_place("requests", Path(requests))
    served = bench.serving(request, Keeping(requests=True))
    write_rows(served, Path(requests))
    return served.report


def serving_capacity(
    model: Model | ServingRequest | None = None,
    device: str | Device | None = None,
    *,
    workers: int = 1,
    home: str | Path | None = None,
    **settings: Any,
) -> Capacity:
    """The largest rate of traffic that meets ``slo``, and how sure that is (`opcast serving capacity`).

    ``workers`` are processes: the answer is the same for any number. The other arguments and errors are those of
    :func:`serving`; RequestError for traffic without a rate.
    """
    from ..simulator.serving import studies

    bench, request = asked("serving", model, {"device": device, **settings}, home)
    return studies.serving_capacity(request, bench, Crew(workers).apply)


def serving_sweep(
    model: Model | ServingRequest | None = None,
    device: str | Device | None = None,
    *,
    rates: Sequence[float] = (),
    workers: int = 1,
    home: str | Path | None = None,
    **settings: Any,
) -> list[tuple[float, ServingReport]]:
    """What comes of the same traffic at each of the ``rates`` (`opcast serving sweep`).

    Requests a second; of a trace how many times faster than recorded. Without any: a tenth of the traffic's rate to
    twice it. The other arguments and errors are those of :func:`serving_capacity`.
    """
    from ..simulator.serving import studies
    from .serving import checked_rates

    bench, request = asked("serving", model, {"device": device, **settings}, home)
    return studies.serving_sweep(request, checked_rates(list(rates)), bench, Crew(workers).apply)


def serving_ways(
    model: Model | ServingRequest | None = None,
    device: str | Device | None = None,
    *,
    workers: int = 1,
    home: str | Path | None = None,
    **settings: Any,
) -> list[WayOfServing]:
    """Replicas that do both beside pools that prefill and decode, the best first (`opcast serving compare`).

    The arguments and errors are those of :func:`serving_capacity`; RequestError for one replica, which no pools share.
    """
    from ..simulator.serving import studies

    bench, request = asked("serving", model, {"device": device, **settings}, home)
    return studies.serving_ways(request, bench, Crew(workers).apply)


def serving_caps(
    model: Model | ServingRequest | None = None,
    device: str | Device | None = None,
    *,
    power_caps_w: Sequence[float],
    node_w: float = 0.0,
    pue: float = 1.0,
    workers: int = 1,
    home: str | Path | None = None,
    **settings: Any,
) -> list[ServedCap]:
    """The same traffic without a cap and under each of ``power_caps_w`` (`opcast serving caps`).

    Joules of an output token count ``node_w`` watts of each node beside its GPUs, and ``pue`` of the building. The
    other arguments and errors are those of :func:`serving_capacity`.
    """
    from ..simulator.serving.caps import serving_caps

    bench, request = asked("serving", model, {"device": device, **settings}, home)
    return serving_caps(request, power_caps_w, node_w, pue, bench, Crew(workers).apply)


def step_latency(
    model: Model | ServingRequest | None = None,
    device: str | Device | None = None,
    *,
    home: str | Path | None = None,
    **settings: Any,
) -> StepLatency:
    """How long single steps of a served model take, for simulators that ask step by step.

    ``settings`` are those of :func:`serving`. The answer has ``seconds(requests)``, of requests as (new tokens, tokens
    cached before), and ``predict_infer_time(batch)`` as the SGLang Simulator and HiSim call it. The errors of
    :func:`serving`.
    """
    from ..simulator.serving.connect import replicas_of
    from ..simulator.serving.step_latency import StepLatency

    bench, request = asked("serving", model, {"device": device, **settings}, home)
    return StepLatency(replicas_of(request, bench)[0])
