"""JAX's coordination service in its own process, so that no process of a job is special.

The launcher runs this file by path, a process per service, which ends with its input. It uses private names of JAX
beside `jax_ring/_compat.py`, because importing the package takes seconds.
"""

import os
import sys
from collections.abc import Mapping

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


def main(address: str, num_processes: str) -> None:
    from jaxlib import _jax

    # One that neither passes a client's death on nor makes clients wait for each other when they exit.
    service = _jax.get_distributed_runtime_service(
        address, int(num_processes), heartbeat_timeout=_HEARTBEAT_SECONDS, recoverable=True
    )
    sys.stdin.read()
    assert service is not None  # alive until here
    # An orderly shutdown would wait for the clients. They have ended, or end with the launcher.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
