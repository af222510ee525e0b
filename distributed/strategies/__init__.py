"""The ways to distribute chunks of tasks over workers, one file each. `auto` chooses by workers and devices."""

import torch

from distributed.info import get_world_info
from distributed.strategies.common.work import Connect, WorkPlan
from distributed.strategies.local import local as in_one_process


def auto(*, plan: WorkPlan, timeout: float) -> Connect:
    """`local` for one worker; `ddp` where every worker has a GPU of its own, and `ddp` can do what the plan asks for;
    else `rpc`. Raises ValueError as the strategy that is chosen."""
    if plan.workers == 1:
        return in_one_process(plan=plan, timeout=timeout)
    # Imported only where they are needed: torch may have been built without RPC.
    if plan.work.device.type == "cuda" and torch.cuda.device_count() >= get_world_info().local_world_size:
        from distributed.strategies.ddp import ddp, fits

        if fits(plan):
            return ddp(plan=plan, timeout=timeout)
    from distributed.strategies.rpc import rpc

    return rpc(plan=plan, timeout=timeout)
