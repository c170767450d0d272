"""Drives vLLM's own scheduler (v1) with requests, without a GPU; run as a script with vLLM on the path.

Reads a list of cases from stdin and writes for each the tokens scheduled in each iteration, request by request, the
preemptions and the tokens that were found in the prefix cache. Its configuration objects are stand-ins: vLLM's real
ones look for a GPU.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any


class Nothing(SimpleNamespace):
    """An object whose unknown attributes are None, or 0 where the name is that of a number."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        number = name.startswith(("num_", "max_")) or name.endswith(("_tokens", "_size", "_window"))
        return 0 if number else None


def scheduler_of(case: dict[str, Any]) -> Any:
    import torch
    from vllm.config import CacheConfig, ObservabilityConfig, SchedulerConfig
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    limits = SchedulerConfig(
        max_num_seqs=case["max_seqs"],
        max_num_batched_tokens=case["max_tokens"],
        max_model_len=case["max_model_len"],
        is_encoder_decoder=False,
        long_prefill_token_threshold=case["long_prefill"],
        scheduler_reserve_full_isl=case["whole_prompt"],
        watermark=case["watermark"],
        enable_chunked_prefill=True,
        async_scheduling=False,
        policy="priority" if "priorities" in case else "fcfs",
    )
    cache = CacheConfig(block_size=16, enable_prefix_caching=case["caching"])
    cache.num_gpu_blocks = case["blocks"]
    spec = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=64, dtype=torch.float16)
    kv = KVCacheConfig(num_blocks=case["blocks"], kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["l0"], spec)])
    model = Nothing(uses_mrope=False, is_encoder_decoder=False, max_model_len=case["max_model_len"])
    sizes = ("world_size", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    more = ("decode_context_parallel_size", "prefill_context_parallel_size", "dcp_kv_cache_interleave_size")
    config = Nothing(
        scheduler_config=limits,
        cache_config=cache,
        model_config=model,
        observability_config=ObservabilityConfig(),
        parallel_config=Nothing(**dict.fromkeys((*sizes, *more, "cp_kv_cache_interleave_size"), 1)),
        aux_output_config=Nothing(enabled=False),
        ec_manager_config=Nothing(get_encoder_cache_manager_obj=lambda *a, **k: None),
        max_concurrent_batches=1,
    )
    grammar = Nothing(accept_tokens=lambda *given: True)
    return Scheduler(
        vllm_config=config,
        kv_cache_config=kv,
        structured_output_manager=grammar,
        block_size=16,
        hash_block_size=16,
        log_stats=True,
    )


def requests_of(case: dict[str, Any]) -> list[Any]:
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    made = []
    for number, (_, prompt, output, prefix, shared) in enumerate(case["requests"]):
        own = [(1000 + number * 7919 + place) % 1_000_003 + 2_000_000 for place in range(prompt)]
        common = [prefix * 100_000 + place for place in range(min(shared, prompt))]
        made.append(
            Request(
                request_id=str(number),
                prompt_token_ids=common + own[len(common) :],
                sampling_params=SamplingParams(max_tokens=output, ignore_eos=True),
                pooling_params=None,
                arrival_time=float(number),
                priority=case["priorities"][number] if "priorities" in case else 0,
                block_hasher=get_request_block_hasher(16, sha256),
            )
        )
    return made


def played(case: dict[str, Any]) -> dict[str, Any]:
    """The schedule of a case: a request comes in before the iteration of its number."""
    from vllm.v1.outputs import ModelRunnerOutput

    scheduler, requests = scheduler_of(case), requests_of(case)
    schedule: list[dict[str, int]] = []
    hits = [0] * len(requests)
    next_one, iteration = 0, 0
    while True:
        while next_one < len(requests) and case["requests"][next_one][0] <= iteration:
            scheduler.add_request(requests[next_one])
            next_one += 1
        if not scheduler.has_requests():
            if next_one == len(requests):
                break
            iteration = case["requests"][next_one][0]
            continue
        out = scheduler.schedule()
        for new in out.scheduled_new_reqs:
            hits[int(new.req_id)] = int(new.num_computed_tokens)
        if out.num_scheduled_tokens:
            schedule.append({name: int(count) for name, count in out.num_scheduled_tokens.items()})
        names = list(out.num_scheduled_tokens)
        samples = []
        for name in names:
            request = scheduler.requests[name]
            ends = request.num_computed_tokens >= request.num_tokens
            samples.append([3_000_000 + int(name) * 1000 + request.num_output_tokens] if ends else [])
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: place for place, name in enumerate(names)},
            sampled_token_ids=samples,
        )
        scheduler.update_from_output(out, output)
        iteration += 1
    return {
        "schedule": schedule,
        "preemptions": [request.num_preemptions for request in requests],
        "hits": hits,
    }


if __name__ == "__main__":
    real, sys.stdout = sys.stdout, sys.stderr
    answers = [played(case) for case in json.load(sys.stdin)]
    json.dump(answers, real)
