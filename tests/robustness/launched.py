"""Runs a script under `jax_ring.launch`, in surroundings that are not as usual."""

import os
import signal
import subprocess
import sys

import pytest

# Takes part in a job of 2 processes: a sum of few numbers, and one of many. Says that each is right, or its error.
SUMS = """
import jax
jax.distributed.initialize()
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P
from jax_ring import ring_psum
mesh = Mesh(jax.devices(), ("i",))
f = jax.jit(jax.shard_map(lambda x: ring_psum(x, "i"), mesh=mesh, in_specs=P("i"), out_specs=P("i")))
for size in (4, 300_000):
    row = np.arange(size, dtype=np.int32)
    sharding = jax.NamedSharding(mesh, P("i"))
    x = jax.make_array_from_callback((mesh.size * size,), sharding, lambda index: np.tile(row, mesh.size)[index])
    compiled = f.lower(x).compile()
    try:
        right = all((np.asarray(shard.data) == mesh.size * row).all() for shard in compiled(x).addressable_shards)
        print(size, "right" if right else "WRONG", flush=True)
    except Exception as error:
        print(size, "error:", str(error).replace("\\n", " "), flush=True)
"""
SECONDS = 90  # in which a launch ends, on a loaded machine too


def launched(path, *options: str, within=(), **environment: str) -> tuple[int, list[str], str]:
    """The status of a launch of 2 processes, the lines of their output, and what it has written to standard error.

    within: a command that runs another one.
    """
    command = [*within, sys.executable, "-P", "-m", "jax_ring.launch", "-n", "2", *options, str(path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "JAX_RING_TIMEOUT_S": "30", **environment},
    ) as process:  # fmt: skip
        try:
            out, err = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, sorted(out.splitlines()), err


def mounted(script: str) -> list[str]:
    """A command that runs another one after a script of mounts, which nobody else sees."""
    unshare = ["unshare", "--mount", *(["--map-root-user"] if os.geteuid() else [])]
    try:
        able = subprocess.run([*unshare, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, check=False)
        why_not = able.stderr.decode()
    except FileNotFoundError as error:
        able, why_not = None, str(error)
    if able is None or able.returncode:
        pytest.skip(f"nothing can be mounted in a namespace here: {why_not}")
    return [*unshare, "sh", "-ec", f'mount --make-rprivate /\n{script}\nexec "$@"', "sh"]
