"""Processes that may have little of something, and one that does the same very often."""

import os
import re

import pytest
from helpers import run_python
from launched import SUMS, launched

pytestmark = [pytest.mark.full, pytest.mark.one_pair]  # jobs of several processes; native code and Python's

# Rank 1 takes this limit when it has compiled its first sum.
LIMITED = """
    if size == 4 and os.environ["JAX_PROCESS_ID"] == "1":
        limit({!r})
    try:"""
LIMITS = """
import os, resource
def limit(what):
    now = 0
    if what == "NOFILE":
        now = os.dup(0)
        os.close(now)
    elif what == "AS":
        now = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    elif what == "NPROC":  # the kernel counts a user's threads, and spares root
        now = len(os.listdir("/proc/self/task"))
        if not os.getuid():
            os.setgroups([])
            os.setresuid(*[70_000 + os.getpid()] * 3)
    number = getattr(resource, "RLIMIT_" + what)
    resource.setrlimit(number, (now, now))
"""


@pytest.mark.parametrize("what", ["NOFILE", "AS", "NPROC", "FSIZE"])
def test_a_limit_of_one_process(tmp_path, what):
    """Its errors, if it has any, name the limit or its own process; no call hangs, and none is wrong."""
    path = tmp_path / "job.py"
    path.write_text(LIMITS + SUMS.replace("\n    try:", LIMITED.format(what)))
    status, out, err = launched(path)
    said = [line[4:] for line in out if re.match(r"\[\d\] \d+ ", line)]
    assert not [line for line in said if "WRONG" in line]
    assert all("right" in line or re.search("ring_psum|rocess 1|memory", line) for line in said), said
    assert status == 0 or "rank 1 " in err, (status, out, err)
    assert status or len(said) == 4, (out, err)


GROWTH = """
import gc, os
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec as P
from jax_ring import ring_psum
mesh = Mesh(jax.devices(), ("i",))

def compiled(i):
    return jax.jit(jax.shard_map(lambda x: ring_psum(x * i, "i"), mesh=mesh, in_specs=P("i"), out_specs=P()))

def show():
    jax.clear_caches()
    gc.collect()
    pages = int(open("/proc/self/statm").read().split()[1])
    threads = [open(f"/proc/self/task/{id}/comm").read() for id in os.listdir("/proc/self/task")]
    ours = threads.count("jax_ring\\n")
    mebibytes = pages * os.sysconf("SC_PAGE_SIZE") >> 20
    print(mebibytes, len(os.listdir("/proc/self/fd")), len(threads) - ours, ours, flush=True)

x = jax.device_put(jnp.ones(8 * 1000), jax.NamedSharding(mesh, P("i")))
f = compiled(1)
for _ in range(2):
    for _ in range(2100):
        f(x).block_until_ready()
    for i in range(300):
        compiled(i)(x).block_until_ready()
        if i % 50 == 0:
            jax.clear_caches()
    show()
"""


def test_calls_and_compilations_leave_nothing():
    result = run_python(GROWTH, timeout=600)
    assert result.returncode == 0, result.stderr
    before, after = (list(map(int, line.split())) for line in result.stdout.splitlines())
    assert after[0] < before[0] + 16, result.stdout
    assert after[1] == before[1], result.stdout
    assert after[2] <= before[2] + os.cpu_count(), result.stdout
    # Ours are the most that were needed at once, whenever that was: a slow call takes one for each of its 8 ranks while
    # those of the call before it finish. Two more watch.
    assert after[3] <= 2 * 8 + 2, result.stdout
