"""A host that does not answer: XLA's collectives end at the deadline, and the message names the call and the host."""

import os
import pathlib
import re
import time

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from job import of_all_processes
from watched import Processes, as_text

from pytest_jax_ring import fault_point, stop

pytestmark = pytest.mark.full  # jobs of several processes

DEADLINE = 1.5


def total(x):
    from jax_ring import ring_psum

    return ring_psum(x, "i")


def gathered_total(x):
    from jax_ring import ring_all_gather

    return ring_all_gather(x, "i").sum(0)


def function_and_operand(devices, sum_of_ranks=total, size=3):
    """A sum over these devices, and its operand, all ones."""
    mesh = Mesh(np.array(devices), ("i",))
    ones = np.ones((mesh.size, size), np.float32)
    x = jax.make_array_from_callback(ones.shape, jax.NamedSharding(mesh, P("i")), lambda index: ones[index])
    return jax.jit(jax.shard_map(sum_of_ranks, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False)), x


def partitioned_function_and_operand(devices):
    """A sum of ones over these devices by `jit` alone, and its operand."""
    _, x = function_and_operand(devices)
    return jax.jit(lambda x: x.sum(0, keepdims=True) * jax.numpy.ones_like(x), out_shardings=x.sharding), x


def wait_until_stopped(pid):
    """Until the state of a process is T, see proc(5)."""
    while b") T " not in pathlib.Path(f"/proc/{pid}/stat").read_bytes():
        time.sleep(0.01)


@pytest.mark.jax_processes(
    2,
    devices=2,
    faults=[stop(1, at="ready")],
    environment=[
        {"JAX_RING_HOST_ID": host, "JAX_RING_TIMEOUT_S": str(DEADLINE), "JAX_ENABLE_RECOVERABILITY": "1"}
        for host in ("one", "other")
    ],
)
def test_a_host_that_does_not_answer_is_named_at_the_deadline(capfd):
    """First in a sum that is XLA's alone, then on two levels: in a sum, a gather, a large sum, and by `jit` alone."""
    import jax_ring  # before JAX starts its backend

    devices = jax.devices()
    calls = [function_and_operand(which) for which in (devices[:: len(devices) // 2], devices)]
    calls.append(function_and_operand(devices, gathered_total))
    calls.append(function_and_operand(devices, size=3_000_000))  # crosses in parts
    calls.append(partitioned_function_and_operand(devices))
    jax_ring.override_lax()
    calls = [(f.lower(x).compile(), x) for f, x in calls]
    pids = of_all_processes(os.getpid())  # none waits to the deadline for one that compiles
    for f, x in calls:
        for shard in f(x).addressable_shards:
            np.testing.assert_array_equal(shard.data[0], len(x))
    fault_point("ready")
    wait_until_stopped(pids[1])
    errors = []
    for f, x in calls:
        with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="Gloo") as raised:
            jax.block_until_ready(f(x))
        errors.append(f"{raised.type.__name__}: {' '.join(str(raised.value).split())}")
        np.testing.assert_array_equal(jax.jit(lambda x: x * 2)(np.arange(3)), [0, 2, 4])
        time.sleep(1)  # a message about a ValueError follows it
    stderr = capfd.readouterr().err
    alone, two_level, gather, in_parts, partitioned = errors
    for error in (alone, in_parts):
        assert "Gloo all-reduce" in error
    for error in (two_level, partitioned):
        assert "Gloo all-to-all" in error
    assert alone.startswith("ValueError")
    assert two_level.startswith("JaxRuntimeError")
    for text in ("ring_psum of float32[1,3] over axis 'i', called at", "(total)", "for process 1 on host "):
        assert text in stderr
        assert text in two_level
    assert "ring_psum of float32[1,3000000] over axis 'i', called at" in in_parts
    assert "ring_all_gather of float32[1,3] over axis 'i', called at" in gather
    call = r"all-reduce of float32\[[13,]+\] over channel \d+ of XLA's partitioner, called at .*<lambda>"
    assert re.search(call, partitioned)
    assert "stopped, busy with something else, or cut off" in stderr


_INITIALIZE = "jax.distributed.initialize(**__import__('watched').distributed)\n"


@pytest.mark.parametrize(
    ("imported_first", "seconds", "flags", "expected"),
    [
        (True, "1.5", "--xla_cpu_collective_timeout_seconds=77", "--xla_cpu_collective_timeout_seconds=77"),
        (True, "1e100", "", "--xla_cpu_collective_timeout_seconds=2147483647"),  # the largest that XLA takes
        (
            False,
            "1.5",
            "--xla_force_host_platform_device_count=3",
            "--xla_force_host_platform_device_count=3 --xla_cpu_collective_timeout_seconds=2",
        ),
    ],
    ids=["the user's", "imported before", "imported after"],
)
def test_xla_gets_the_deadline_unless_the_user_has_set_a_limit(imported_first, seconds, flags, expected):
    lines = ["import jax_ring\n", _INITIALIZE]
    with Processes(
        f"import jax, os\n{''.join(lines if imported_first else lines[::-1])}jax.devices()\n"
        "from jax_ring.distributed import xla_timeouts\n"
        "print('flags', os.environ['XLA_FLAGS'], xla_timeouts._state.xla_limit)",
        1, distributed=None, environment={"JAX_RING_TIMEOUT_S": seconds, "XLA_FLAGS": flags},
    ) as program:  # fmt: skip
        (result,) = program.wait()
    assert result.returncode == 0, as_text([result])
    # The message comes after the limit, whoever has set it.
    assert result.stdout.split("flags ")[-1].strip() == f"{expected} {expected.rpartition('=')[2]}"
