"""The ways to distribute chunks of tasks over workers, one file each. `auto` chooses by the number of workers."""

from distributed.strategies import local, rpc
from distributed.strategies.common.work import Connect, WorkPlan


def auto(
    *,
    plan: WorkPlan,
    timeout: float,
    device_maps: str = "auto",
    fan_out: int | str = "auto",
    max_lost: int | str = "auto",
) -> Connect:
    """`local` for one worker, else `rpc`. The settings of `rpc` are checked for one worker, too.

    Raises:
        ValueError: as `rpc`.
    """
    remotely = rpc.rpc(plan=plan, timeout=timeout, device_maps=device_maps, fan_out=fan_out, max_lost=max_lost)
    return local.local(plan=plan, timeout=timeout, device_maps=device_maps) if plan.workers == 1 else remotely
