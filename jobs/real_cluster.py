"""Runs a training step on several processes for real: torch's own data parallelism, FSDP2 and tensor parallelism.

``python -P -m opcast.jobs.real_cluster REQUEST`` is one rank; :func:`run_ranks` starts them all, over gloo on this
machine. Each rank has one thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..harness.environment import child_environment, use_loopback
from ..simulator.trace.models import resolve
from ..simulator.trace.workload import Workload
from .real_run import RealRunError

LIMIT_S = 300.0
WARM_UP = 4  # steps until buffers of all sizes are mapped: FSDP's first three took up to three times as long


def run_ranks(model: str | Mapping[str, Any], layout: str, seq_len: int, repeats: int, ranks: int = 2) -> list[float]:
    """Seconds of ``repeats`` training steps of one sequence a rank (tensor ranks share one), of the slowest rank.

    RealRunError when a rank fails.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    request = {"model": model, "layout": layout, "seq_len": seq_len, "repeats": repeats, "ranks": ranks, "port": port}
    started = [
        subprocess.Popen(
            [sys.executable, "-P", "-m", "opcast.jobs.real_cluster", json.dumps({**request, "rank": rank})],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=child_environment(1),
        )
        for rank in range(ranks)
    ]
    return answers(started, layout)[0]["seconds"]


def answers(started: Sequence[subprocess.Popen[str]], layout: str) -> list[dict[str, Any]]:
    """What each rank answered, however it ended behind that. RealRunError for one that gave no answer."""
    try:
        outputs = [process.communicate(timeout=LIMIT_S) for process in started]
    except subprocess.TimeoutExpired:
        raise RealRunError(f"{layout} of {len(started)} ranks did not end within {LIMIT_S:.0f} s") from None
    finally:
        for process in started:
            process.kill()
    for process, (output, errors) in zip(started, outputs, strict=True):
        if not output.strip():
            last = (errors.strip().splitlines() or ["no message"])[-1]
            raise RealRunError(f"a rank of {layout} ended with code {process.returncode}: {last}")
    return [json.loads(output.strip().splitlines()[-1]) for output, _ in outputs]


def rank(request: Mapping[str, Any]) -> list[float]:
    """One rank's part: the seconds of its steps, the largest over ranks."""
    import torch
    import torch.distributed as dist

    from ..simulator.trace.build import build

    use_loopback()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    address = f"tcp://127.0.0.1:{request['port']}"
    dist.init_process_group("gloo", init_method=address, rank=request["rank"], world_size=request["ranks"])
    workload = Workload("train", seq_len=request["seq_len"])
    module = build(resolve(request["model"]), workload, "fp32").module
    step = STEPS[request["layout"]](module.train(), workload, request["ranks"])
    seconds = []
    for _ in range(WARM_UP + request["repeats"]):
        dist.barrier()
        start = time.perf_counter()
        step()
        longest = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        seconds.append(float(longest))
    return seconds[WARM_UP:]


def data_parallel(module: Any, workload: Any, ranks: int) -> Callable[[], None]:
    """DistributedDataParallel: gradients are summed in buckets while the backward pass runs."""
    from torch.nn.parallel import DistributedDataParallel

    from ..simulator.trace.steps import make_optimizer, token_ids

    tokens = token_ids(module, workload.batch, workload.seq_len)
    wrapped, optimizer = DistributedDataParallel(module), make_optimizer(module)

    def step() -> None:
        wrapped(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        module.zero_grad(set_to_none=True)

    return step


def fully_sharded(module: Any, workload: Any, ranks: int) -> Callable[[], None]:
    """FSDP2: every layer's weights are gathered before it runs, and its gradients scattered behind it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from ..simulator.trace.steps import training_step

    mesh = init_device_mesh("cpu", (ranks,))
    for layer in module.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return training_step(module, workload)


def tensor_parallel(module: Any, workload: Any, ranks: int) -> Callable[[], None]:
    """DTensor: products cut by columns, then by rows; embeddings, logits and the loss by vocabulary.

    What several products read is made a DTensor once, as torchtitan does, so that its gradient is summed up once.
    """
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        loss_parallel,
        parallelize_module,
    )
    from torch.nn import functional

    from ..simulator.trace.steps import token_ids

    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    rows = ("self_attn.o_proj", "mlp.down_proj")
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    replicated = Replicate()
    plan["model.layers.*.mlp"] = PrepareModuleInput(input_layouts=(replicated,), desired_input_layouts=(replicated,))
    plan["model.layers.*.self_attn"] = PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": replicated}, desired_input_kwarg_layouts={"hidden_states": replicated}
    )
    plan |= {f"model.layers.*.{name}": ColwiseParallel() for name in columns}
    plan |= {f"model.layers.*.{name}": RowwiseParallel() for name in rows}
    parallelize_module(module, init_device_mesh("cpu", (ranks,)), plan)
    parameters = list(module.parameters())
    groups = [[p for p in parameters if isinstance(p, DTensor) is cut] for cut in (True, False)]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=1e-5, fused=True)
    tokens = token_ids(module, workload.batch, workload.seq_len)

    def step() -> None:
        with loss_parallel():
            logits = module(input_ids=tokens, use_cache=False).logits
            functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(0, 1)).backward()
        optimizer.step()
        module.zero_grad(set_to_none=True)

    return step


STEPS = {"dp": data_parallel, "fsdp": fully_sharded, "tp": tensor_parallel}


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        found = rank(json.loads(sys.argv[1]))
    print(json.dumps({"seconds": found}), flush=True)
    os._exit(0)  # threads of gloo that still run when Python takes its objects down abort the process
