"""JAX's coordination service in its own process, so that no process of a job is special.

The launcher runs this file by path, a process per service. It loads jaxlib, reads one JSON command from standard input,
starts the service, answers, and ends with its input. `worker.py` loads the file for `without_service`.

It uses private names of JAX beside `jax_ring/_compat.py`, because it must not import the package: that takes seconds,
and in a script's process would import JAX too early.
"""

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping

# A process without a heartbeat for this long counts as dead. Only queries for live processes see that: the launcher
# knows of deaths, and the engine notices them.
_HEARTBEAT_SECONDS = 100


def without_proxy(address: str, outer: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables with which gRPC connects to host:port itself, where others are reached by a proxy.

    gRPC reads lower case alone. Other programs read upper case where there is no lower case.
    """
    if not any(outer.get(name) for name in ("grpc_proxy", "https_proxy", "http_proxy")):
        return {}
    host = address.rpartition(":")[0].strip("[]")
    entries = {"no_proxy": outer.get("no_proxy", outer.get("NO_PROXY", ""))}
    if "no_grpc_proxy" in outer:
        entries["no_grpc_proxy"] = outer["no_grpc_proxy"]
    return {name: ",".join(filter(None, (given, host))) for name, given in entries.items()}


@contextlib.contextmanager
def without_service() -> Iterator[None]:
    """Within the block, `jax.distributed.initialize` starts no service in process 0."""
    from jax._src import distributed

    module, name = getattr(distributed, "_jax", None), "get_distributed_runtime_service"
    if (original := getattr(module, name, None)) is None:
        import jax

        raise RuntimeError(
            f"jax_ring.launch does not support JAX {jax.__version__}: jax._src.distributed has no "
            "_jax.get_distributed_runtime_service. Upgrade jax_ring, or install a version of JAX that it was tested "
            "with (see its README)."
        )
    setattr(module, name, lambda *args, **options: None)
    try:
        yield
    finally:
        setattr(module, name, original)


@contextlib.contextmanager
def with_own_handler() -> Iterator[None]:
    """Within the block JAX may connect; the script's handler of SIGTERM, if it has one, is back afterwards.

    JAX's preemption service replaces it, and Python does not notice.
    """
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if callable(handler):
            with contextlib.suppress(ValueError):  # in another thread than the main one Python refuses
                signal.signal(signal.SIGTERM, handler)


def stand_in(address: str, process_id: int) -> None:
    """Connects for a process that has died: others wait in `connect` for it, and would abort."""
    from jaxlib import _jax

    client = _jax.get_distributed_runtime_client(address, process_id, shutdown_on_destruction=False)
    client.connect()
    sys.stdin.read()


def main() -> None:
    if sys.argv[1:2] == ["stand-in"]:
        stand_in(sys.argv[2], int(sys.argv[3]))
        os._exit(0)
    from jaxlib import _jax  # the slow part, done before the command comes

    if line := sys.stdin.readline():
        command = json.loads(line)
        # One that neither passes a client's death on nor makes clients wait for each other when they exit.
        service = _jax.get_distributed_runtime_service(
            command["address"], command["num_processes"], heartbeat_timeout=_HEARTBEAT_SECONDS, recoverable=True
        )
        print(json.dumps({"started": command["address"]}), flush=True)
        sys.stdin.read()
        assert service is not None  # alive until here
    # An orderly shutdown would wait for the clients. They have ended, or end with the launcher.
    os._exit(0)


if __name__ == "__main__":
    main()
