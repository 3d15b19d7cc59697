"""JAX's coordination service in a process of its own, so that no process of a job is special.

The launcher runs this file by its path, one process per service. The process loads jaxlib, then reads one command from
its standard input, a JSON object, starts the service, and answers. It ends with its input, so it does not outlive the
launcher. `worker.py` loads the file as well, for `without_service`.

It uses private names of JAX, as only `jax_ring/_compat.py` does otherwise. It must not import the package: that takes
seconds in the service's process, and in a script's process it would import JAX too early.
"""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

# A process without a heartbeat for this long counts as dead. Only what asks the service for the processes that are
# alive sees it: the launcher knows of deaths, and the engine notices them.
_HEARTBEAT_SECONDS = 100


def start_service(address: str, num_processes: int) -> Any:
    """Starts a service that survives the death of its clients.

    The service of a recoverable job neither passes on a client's death to the others nor makes them wait for each
    other when they exit.

    Args:
      address: host:port at which to listen.
      num_processes: the number of clients. Each blocks in `connect` until all have connected.
    """
    from jaxlib import _jax

    return _jax.get_distributed_runtime_service(
        address, num_processes, heartbeat_timeout=_HEARTBEAT_SECONDS, recoverable=True
    )


@contextlib.contextmanager
def without_service() -> Iterator[None]:
    """Until the end of the block, `jax.distributed.initialize` starts no service in process 0.

    Raises:
      RuntimeError: if this version of JAX starts its service in another way.
    """
    from jax._src import distributed

    original = getattr(distributed, "_jax", None)
    if not hasattr(original, "get_distributed_runtime_service"):
        import jax

        raise RuntimeError(
            f"jax_ring.launch does not support JAX {jax.__version__}: jax._src.distributed has no "
            "_jax.get_distributed_runtime_service. Upgrade jax_ring, or install a version of JAX that it was tested "
            "with (see its README)."
        )
    distributed._jax = _WithoutService(original)  # type: ignore[assignment]
    try:
        yield
    finally:
        distributed._jax = original


class _WithoutService:
    """A module of jaxlib, except that it starts no service."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def get_distributed_runtime_service(self, *args, **options) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def stand_in(address: str, process_id: int) -> None:
    """Connects for a process that has died.

    Clients wait in `connect` until all have connected, and abort their processes if one does not come.
    """
    from jaxlib import _jax

    client = _jax.get_distributed_runtime_client(address, process_id, shutdown_on_destruction=False)
    client.connect()
    sys.stdin.read()


def main() -> None:
    if sys.argv[1:2] == ["stand-in"]:
        stand_in(sys.argv[2], int(sys.argv[3]))
        os._exit(0)
    from jaxlib import _jax  # noqa: F401  # the slow part, done before the command comes

    if line := sys.stdin.readline():
        command = json.loads(line)
        service = start_service(command["address"], command["num_processes"])
        print(json.dumps({"started": command["address"]}), flush=True)
        sys.stdin.read()
        assert service is not None  # it lives until here
    # A service that shuts down in order would wait for its clients; these have ended, or end with the launcher.
    os._exit(0)


if __name__ == "__main__":
    main()
