"""Runs the user's script in a process of `jax_ring.launch`, with `jax.distributed.initialize` needing no arguments.

The launcher runs this file by its path, not as a module. Importing the package would import JAX, and scripts set
environment variables before they import JAX.
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


def die_with_parent(launcher_pid: int) -> None:
    """Makes the kernel kill this process when the launcher exits, even if the launcher was killed itself."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # The launcher may have exited before the call above.
    if os.getppid() != launcher_pid:
        raise SystemExit(128 + signal.SIGKILL)


def with_environment_defaults(initialize):
    """`jax.distributed.initialize`, with the number of processes and the process id taken from the environment.

    JAX itself reads only the coordinator's address and the local device ids from there.
    """

    @functools.wraps(initialize)
    def initialize_with_defaults(coordinator_address=None, num_processes=None, process_id=None, *rest, **options):
        if num_processes is None:
            num_processes = int(os.environ["JAX_NUM_PROCESSES"])
        if process_id is None:
            process_id = int(os.environ["JAX_PROCESS_ID"])
        return initialize(coordinator_address, num_processes, process_id, *rest, **options)

    return initialize_with_defaults


class InitializePatcher(importlib.abc.MetaPathFinder):
    """Replaces `jax.distributed.initialize` when the script imports JAX, if it does."""

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
            module.initialize = with_environment_defaults(module.initialize)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def main(launcher_pid: str, *command: str) -> None:
    die_with_parent(int(launcher_pid))
    sys.meta_path.insert(0, InitializePatcher())
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # as on a terminal
    sys.argv[:] = command
    # As Python does for a script.
    sys.path.insert(0, os.path.dirname(os.path.realpath(command[0])))
    runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
