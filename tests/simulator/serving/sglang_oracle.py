"""Drives SGLang's own scheduler with requests, without a GPU; run as a script with the folder of its wheel.

Reads a list of cases from stdin and writes for each the tokens scheduled in each iteration, request by request, the
retractions and the tokens that were found in the radix cache. Real are ``Scheduler.get_next_batch_to_run`` and all
that decides in it: ``PrefillAdder``, ``ScheduleBatch``, ``Req``, the radix cache, the pools and their allocator.
Settings are given by hand, and every other module (models, kernels, network) is an object that does nothing.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import sys
import types
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

MANAGERS, CACHE = "sglang.srt.managers", "sglang.srt.mem_cache"
REAL = (
    f"{MANAGERS}.schedule_policy",
    f"{MANAGERS}.schedule_batch",
    f"{MANAGERS}.scheduler",
    f"{MANAGERS}.scheduler_components.new_token_ratio_tracker",
    f"{MANAGERS}.prefill_delayer",
    "sglang.srt.environ",
    CACHE,
    "sglang.srt.sampling.sampling_params",
    "sglang.srt.model_executor.forward_batch_info",
    "sglang.srt.dllm.mixin",
)
PARENTS = {".".join(name.split(".")[:end]) for name in REAL for end in range(1, name.count(".") + 1)} | {CACHE}


class NoType(type):
    """A class that does nothing, whose unknown attributes are such classes."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, nothing(name))
        return cls.__dict__[name]

    def __bool__(cls) -> bool:
        return False

    def __or__(cls, other: Any) -> Any:
        return cls

    def __ror__(cls, other: Any) -> Any:
        return cls

    def __getitem__(cls, key: Any) -> Any:
        return cls

    def __iter__(cls) -> Any:
        return iter(())

    def __enter__(cls) -> Any:
        return cls

    def __exit__(cls, *given: Any) -> None:
        pass


def nothing(name: str) -> Any:
    """A class that can be called, entered and used as a decorator, all in vain."""

    def decorated(cls: Any, *given: Any, **named: Any) -> Any:
        return given[0] if len(given) == 1 and callable(given[0]) and not named else object.__new__(cls)

    def unknown(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return nothing(name)

    body = {
        "__new__": decorated,
        "__init__": lambda self, *given, **named: None,
        "__getattr__": unknown,
        "__call__": lambda self, *given, **named: given[0] if len(given) == 1 and callable(given[0]) else None,
        "stood_in": True,
        "__bool__": lambda self: "stood_in" not in vars(type(self)),  # true where a real class has it as a base
        "__enter__": lambda self: self,
        "__exit__": lambda self, *given: None,
    }
    return NoType(name, (), body)


def never(*given: Any, **named: Any) -> bool:
    return False


GIVEN = {
    "ceil_align": lambda count, size: -(-count // size) * size,
    "attention_backends": lambda: ("torch_native", "torch_native"),
    "support_triton": never,
    "num_beam_member_rows": lambda requests: 0,
    "beam_retraction_order": lambda order, requests: order,
}


class NoModule(types.ModuleType):
    """A module of such classes."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = GIVEN[name] if name in GIVEN else never if name.startswith("is_") else nothing(name)
        setattr(self, name, made)
        return made


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds what is real in the folder, and stands in for the rest of SGLang and what it alone imports."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_spec(self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None) -> Any:
        stood_in = importlib.machinery.ModuleSpec(name, self, is_package=True)
        if name.split(".")[0] == "sglang":
            if name in PARENTS or not any(name == real or name.startswith(real + ".") for real in REAL):
                return stood_in
            return importlib.machinery.PathFinder.find_spec(name, [str(self.folder.joinpath(*name.split(".")[:-1]))])
        frame = sys._getframe(1)
        while frame.f_back is not None and "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        known = importlib.machinery.PathFinder.find_spec(name.split(".")[0])
        return stood_in if str(frame.f_globals.get("__name__")).startswith("sglang") and known is None else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        if spec.name not in PARENTS:
            return NoModule(spec.name)
        bare = types.ModuleType(spec.name)
        bare.__path__ = [str(self.folder.joinpath(*spec.name.split(".")))]
        return bare

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class Settings(types.SimpleNamespace):
    """Settings; those that are not given are off."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def settings_of(case: dict[str, Any]) -> dict[str, Settings]:
    """What SGLang's functions ``get_...()`` of its runtime answer."""
    return {
        "schedule": Settings(
            schedule_policy="fcfs",
            schedule_conservativeness=case["conservativeness"],
            retraction_policy="length",
            scheduler_recv_interval=1,
            chunked_prefill_size=case["chunk"],
        ),
        "parallel": Settings(pp_max_micro_batch_size=case["max_seqs"], tp_size=1, pp_size=1, dcp_enabled=False),
        "memory": Settings(radix_eviction_policy="lru"),
        "exec": Settings(features=Settings(), mamba=Settings()),
        "disagg": Settings(disaggregation_mode="null"),
        "spec": Settings(),
        "serving": Settings(),
        "context": Settings(is_config_namespace_published=lambda name: False),
    }


def scheduler_of(case: dict[str, Any]) -> Any:
    import torch
    from sglang.srt.disaggregation.utils import DisaggregationMode
    from sglang.srt.managers.schedule_policy import PrefillAdder, SchedulePolicy
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.new_token_ratio_tracker import NewTokenRatioTracker
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.mem_cache.radix_cache import RadixCache

    class Driven(Scheduler):  # type: ignore[misc]
        def __init__(self) -> None:
            pass

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return None

    longest = max(row[1] + row[2] for row in case["requests"]) + 8
    rows = ReqToTokenPool(case["max_seqs"], longest, "cpu", False)
    pool = TokenToKVPoolAllocator(case["tokens"], torch.float16, "cpu", None, False)
    tree = RadixCache(CacheInitParams(not case["caching"], rows, pool, 1))
    plain = Settings(is_none=lambda: True)
    same = lambda batch, **named: batch  # noqa: E731
    made = Driven()
    made.__dict__.update(
        waiting_queue=[],
        page_size=1,
        tree_cache=tree,
        token_to_kv_pool_allocator=pool,
        req_to_token_pool=rows,
        policy=SchedulePolicy("fcfs", tree, False, False, False),
        new_token_ratio_tracker=NewTokenRatioTracker.from_config(),
        max_prefill_tokens=case["max_tokens"],
        max_prefill_bs=0,
        chunked_prefill_size=case["chunk"],
        max_running_requests=case["max_seqs"],
        is_mixed_chunk=case["mixed"],
        model_config=Settings(vocab_size=1 << 40, is_encoder_decoder=False),
        spec_algorithm=plain,
        enable_overlap=False,
        device="cpu",
        disaggregation_mode=DisaggregationMode.NULL,
        grammar_manager=Settings(has_waiting_grammars=lambda: False),
        tp_worker=Settings(model_runner=Settings()),
        load_inquirer=Settings(_get_num_pending_tokens=lambda **named: 0),
        metrics_reporter=Settings(),
        beam_coordinator=Settings(pending_member_rows=lambda batch: 0),
        dp_attn_adapter=Settings(maybe_prepare_mlp_sync_batch=same, maybe_convert_decode_to_extend=same),
        ngram_embedding_manager=Settings(prepare_for_forward=same),
        process_pending_chunked_abort=lambda: None,
        _process_hicache_events=lambda: None,
        _should_defer_prefill=lambda batch: False,
        _arm_prefill_decode_interval=lambda batch: None,
        _set_or_validate_priority=lambda request: True,
        _abort_on_queued_limit=lambda request: False,
        _prefetch_kvcache=lambda request: None,
        get_prefill_adder_class=lambda: PrefillAdder,
    )
    return made


def requests_of(case: dict[str, Any]) -> list[Any]:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    made = []
    for number, (_, prompt, output, prefix, shared) in enumerate(case["requests"]):
        own = [2_000_000 + number * 10_000 + place for place in range(prompt)]
        common = [prefix * 100_000 + place for place in range(min(shared, prompt))]
        limits = SamplingParams(max_new_tokens=output, stop_token_ids=None, ignore_eos=case["ignore_eos"])
        limits.normalize(None)
        made.append(Req(str(number), "", array("q", common + own[len(common) :]), limits, vocab_size=1 << 40))
    return made


def finish(batch: Any, tree: Any) -> None:
    """What a forward pass does to its requests: a token for each whose prompt is computed."""
    from sglang.srt.mem_cache.common import checkpoint_kv_cache, release_kv_cache

    decodes = batch.decoding_reqs or []
    for request in batch.reqs:
        if request.inflight_middle_chunks > 0:
            request.inflight_middle_chunks -= 1
            continue
        request.output_ids.append(3_000_000_000 + int(request.rid) * 1000 + len(request.output_ids))
        request.update_finish_state()
        if request.finished():
            release_kv_cache(request, tree, checkpoint=True)
        elif batch.forward_mode.is_extend() and request not in decodes:
            checkpoint_kv_cache(request, tree)


def tokens_of(batch: Any) -> dict[str, int]:
    """How many tokens of each request are in a batch."""
    tokens = [1] * len(batch.reqs) if batch.forward_mode.is_decode() else batch.extend_lens
    return {request.rid: int(count) for request, count in zip(batch.reqs, tokens, strict=True)}


def played(case: dict[str, Any]) -> dict[str, Any]:
    """The schedule of a case: a request comes in before the iteration of its number."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    for name, given in settings_of(case).items():
        for module in [m for n, m in list(sys.modules.items()) if n.startswith("sglang")]:
            if f"get_{name}" in vars(module):
                setattr(module, f"get_{name}", lambda given=given: given)
    scheduler, requests = scheduler_of(case), requests_of(case)
    running, last = ScheduleBatch(reqs=[], batch_is_full=False), None
    schedule: list[dict[str, int]] = []
    hits = [-1] * len(requests)
    next_one, iteration = 0, 0
    while True:
        while next_one < len(requests) and case["requests"][next_one][0] <= iteration:
            scheduler._add_request_to_queue(requests[next_one])
            next_one += 1
        plan = scheduler.get_next_batch_to_run(running, last)
        running, last = plan.running_batch, plan.batch_to_run
        if last is None:
            scheduler.new_token_ratio_tracker.reset()
            assert not scheduler.waiting_queue, "nobody runs, and somebody waits"
            if next_one == len(requests):
                break
            iteration = case["requests"][next_one][0]
            continue
        schedule.append(tokens_of(last))
        for request in last.reqs:
            if hits[int(request.rid)] < 0:
                hits[int(request.rid)] = request.prefix_len
        finish(last, scheduler.tree_cache)
        iteration += 1
    return {"schedule": schedule, "preemptions": [request.retraction_count for request in requests], "hits": hits}


if __name__ == "__main__":
    real, sys.stdout = sys.stdout, sys.stderr
    import numpy as np  # noqa: F401 (before modules are stood in for)
    import torch  # noqa: F401
    import transformers  # noqa: F401

    sys.meta_path.insert(0, Finder(Path(sys.argv[1])))

    answers = [played(case) for case in json.load(sys.stdin)]
    json.dump(answers, real)
