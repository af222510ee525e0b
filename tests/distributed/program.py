"""Programs that the tests run on several ranks: python program.py NAME."""

import sys

import distributed as todist
from distributed import session
from tests.distributed import remote_functions


def serve() -> None:
    """Does what it is asked until rank zero is done."""
    session.start_rpc(timeout=20)
    session.stop_rpc()


@todist.auto_init_rpc()
def twice_inner() -> int:
    if todist.get_rank() == 0:
        ranks = todist.remote_sync_call(remote_functions.rank, partitioner=1)
        todist.remote_sync_call(remote_functions.rank, partitioner=f"worker{todist.get_world_size() - 1}")
        return int(ranks[0])
    return -1


def twice() -> None:
    """Starts and stops RPC two times in one process."""
    print(twice_inner(), twice_inner())


def init_fails() -> None:
    def prepare() -> None:
        if todist.get_rank() == 1:
            raise OSError("no such thing here")

    @todist.auto_init_rpc(prepare)
    def main() -> None:
        print("main was entered")

    main()


def one() -> None:
    """A world of one under plain python."""

    @todist.auto_init_rpc()
    def main() -> list[int]:
        return list(todist.remote_sync_call(remote_functions.rank, partitioner=0))

    print(main(), todist.get_world_info())


if __name__ == "__main__":
    {"serve": serve, "twice": twice, "init_fails": init_fails, "one": one}[sys.argv[1]]()
