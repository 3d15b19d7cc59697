"""What `jax_ring.launch` runs as each process: the user's script, tied to the launcher and told which process it is.

It is run by its path, not as a module of this package, whose import brings JAX: scripts set options in the environment
before they import JAX, and must find it not imported yet.
"""

import ctypes
import functools
import importlib.abc
import importlib.util
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def die_with(launcher: int) -> None:
    """Has the kernel kill this process when the launcher is gone, even if that had no time to do it itself."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # It may have gone before.
    if os.getppid() != launcher:
        raise SystemExit(128 + signal.SIGKILL)


def complete(initialize):
    """`jax.distributed.initialize`, with the count and the number of processes from the environment.

    JAX looks there for the coordinator's address and the local devices only.
    """

    @functools.wraps(initialize)
    def completed(coordinator_address=None, num_processes=None, process_id=None, *rest, **options):
        if num_processes is None:
            num_processes = int(os.environ["JAX_NUM_PROCESSES"])
        if process_id is None:
            process_id = int(os.environ["JAX_PROCESS_ID"])
        return initialize(coordinator_address, num_processes, process_id, *rest, **options)

    return completed


class CompletesInitialize(importlib.abc.MetaPathFinder):
    """Replaces `jax.distributed.initialize` when, and if, the script imports JAX."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname != "jax.distributed":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            module.initialize = complete(module.initialize)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def main(launcher: str, *command: str) -> None:
    die_with(int(launcher))
    sys.meta_path.insert(0, CompletesInitialize())
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # as on a terminal
    sys.argv[:] = command
    # As Python itself does for a script.
    sys.path.insert(0, os.path.dirname(os.path.realpath(command[0])))
    runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
