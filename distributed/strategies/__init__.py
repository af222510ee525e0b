"""The ways to distribute chunks of tasks over workers, one file each. `auto` chooses by the number of workers."""

from distributed.strategies import local, rpc
from distributed.strategies.common.work import Connect, Plan


def auto(*, plan: Plan, timeout: float, device_maps: str = "auto") -> Connect:
    """`local` for one worker, else `rpc`."""
    chosen = local.local if plan.workers == 1 else rpc.rpc
    return chosen(plan=plan, timeout=timeout, device_maps=device_maps)
