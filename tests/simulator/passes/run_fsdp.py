"""One rank of a model under FSDP2 on CPUs; the first prints the most bytes that torch's allocator held in a step."""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from opcast.simulator.trace import Workload
from opcast.simulator.trace.build import build
from opcast.simulator.trace.models import resolve
from opcast.simulator.trace.steps import prepare
from opcast.tests.simulator.peaks import torch_peak


def main(config: str, batch: int, seq_len: int) -> None:
    """Runs one step unmeasured and one measured; rank and ranks are in the environment, as torchrun sets them."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    workload = Workload("train", batch=batch, seq_len=seq_len, optimizer="none")
    module = build(resolve(json.loads(config)), workload, "fp32").module
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (*module.model.layers, module.model.embed_tokens, module):
        fully_shard(part, mesh=mesh)
    forward = prepare(module, workload)

    def step() -> object:
        output = forward.run()
        output.loss.backward()
        return output

    step()
    module.zero_grad(set_to_none=True)
    peak = torch_peak(step)
    if dist.get_rank() == 0:
        print(json.dumps({"peak": peak}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
