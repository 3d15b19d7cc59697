"""A process is killed, at any moment of its life: the launcher names it, ends the others, and leaves nothing behind."""

import glob

import pytest
from launched import launched

from jax_ring.launcher.processes import state_of

pytestmark = [pytest.mark.full, pytest.mark.one_pair]  # jobs of several processes; native code and Python's

JOB = """
import atexit, os, signal, sys
print("pid", os.getpid(), flush=True)
def at(moment):
    if moment == {moment!r} and os.environ["JAX_PROCESS_ID"] == {victim!r}:
        os.kill(os.getpid(), signal.SIGKILL)
at("begin")
import jax
import numpy as np
import jax_ring
from jax.sharding import Mesh, PartitionSpec as P
at("import")
jax.distributed.initialize()
at("initialize")
from jax_ring.launcher import protocol
print("memory", protocol.memory_prefix(), flush=True)
mesh = Mesh(jax.devices(), ("i",))
sharding = jax.NamedSharding(mesh, P("i"))
f = jax.jit(jax.shard_map(lambda x: jax_ring.ring_psum(x, "i"), mesh=mesh, in_specs=P("i"), out_specs=P("i")))
x = jax.make_array_from_callback((mesh.size,), sharding, lambda index: np.ones(mesh.size, np.int32)[index])
f = f.lower(x).compile()
at("compile")
for i in range(100):
    jax.block_until_ready(f(x))
    if i == 50: at("call")
atexit.register(at, "exit")
"""
MOMENTS = ("begin", "import", "initialize", "compile", "call", "exit")


@pytest.mark.parametrize(("moment", "victim"), [(moment, str(i % 2)) for i, moment in enumerate(MOMENTS)])
def test_a_process_that_is_killed(tmp_path, moment, victim):
    path = tmp_path / "job.py"
    path.write_text(JOB.format(moment=moment, victim=victim))
    status, out, err = launched(path, "--grace", "3")
    assert status == 128 + 9, (status, out, err)
    assert f"rank {victim} " in err, err
    pids = [int(line.split()[-1]) for line in out if "] pid " in line]
    assert pids, out
    assert all(state_of(pid) in ("", "Z", "X") for pid in pids)
    prefixes = {line.split()[-1] for line in out if "] memory " in line}
    assert not [name for prefix in prefixes for name in glob.glob(f"/dev/shm/jax_ring-{prefix}*")]
