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
# JAX's settings of mutual TLS: arguments of `jax.distributed.initialize`, and environment variables.
MTLS = {name: f"JAX_{name.upper()}" for name in ("mtls_cert_file", "mtls_key_file", "mtls_ca_file")}
_MTLS_PREFIX = "JAX_MTLS_PEER_URI_PREFIX"
_VERIFY = "JAX_DISTRIBUTED_VERIFY_SECURE_CREDENTIALS"


def without_proxy(address: str, outer: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables with which gRPC connects to host:port itself, where others are reached by a proxy.

    gRPC reads lower case alone. Other programs read upper case where there is no lower case.
    """
    if address.startswith("unix:") or not any(outer.get(name) for name in ("grpc_proxy", "https_proxy", "http_proxy")):
        return {}
    host = address.rpartition(":")[0].strip("[]")
    entries = {"no_proxy": outer.get("no_proxy", outer.get("NO_PROXY", ""))}
    if "no_grpc_proxy" in outer:
        entries["no_grpc_proxy"] = outer["no_grpc_proxy"]
    return {name: ",".join(filter(None, (given, host))) for name, given in entries.items()}


def is_found_at_a_socket(outer: Mapping[str, str] = os.environ) -> bool:
    """Whether clients accept a service at a Unix socket: it has no host that a certificate could name."""
    return not any(map(outer.get, MTLS.values())) or bool(outer.get(_MTLS_PREFIX))


def _credentials() -> dict[str, str | bool]:
    """What the service takes of JAX's settings, as JAX reads them."""
    names = MTLS | {"mtls_peer_uri_prefix": _MTLS_PREFIX}
    found: dict[str, str | bool] = {name: os.environ[each] for name, each in names.items() if each in os.environ}
    if os.environ.get(_VERIFY, "").lower() in ("y", "yes", "t", "true", "on", "1"):
        found["verify_secure_credentials"] = True
    return found


def main(address: str, num_processes: str) -> None:
    from jaxlib import _jax

    credentials = _credentials()
    if credentials and "mtls_cert_file" not in (_jax.get_distributed_runtime_service.__doc__ or ""):
        given = ", ".join(name for name in (*MTLS.values(), _MTLS_PREFIX, _VERIFY) if name in os.environ)
        sys.exit(f"this version of JAX has no mutual TLS: install JAX 0.12 or newer, or unset {given}")
    os.umask(0o077)  # with another, the job's user may not be able to connect
    # One that neither passes a client's death on nor makes clients wait for each other when they exit.
    service = _jax.get_distributed_runtime_service(
        address, int(num_processes), heartbeat_timeout=_HEARTBEAT_SECONDS, recoverable=True, **credentials
    )
    sys.stdin.read()
    assert service is not None  # alive until here
    # An orderly shutdown would wait for the clients. They have ended, or end with the launcher.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
