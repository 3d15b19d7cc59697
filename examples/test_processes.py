"""Tests in several processes, with the pytest plugin of jax_ring.

python -m pytest -n 0 examples/test_processes.py
"""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec as P

from jax_ring import ring_psum
from pytest_jax_ring import fault_point, kill


@pytest.mark.jax_processes(4, devices=2)
def test_all_processes_see_all_values():
    assert jax.device_count() == 8
    seen = multihost_utils.process_allgather(jnp.int32(jax.process_index()))
    assert seen.tolist() == [0, 1, 2, 3]


@pytest.mark.jax_processes(3, faults=[kill(1, at="step 2")])
def test_the_others_notice():
    """After two steps process 1 is killed. The others get an error that names it, and do not hang."""
    mesh = jax.make_mesh((3,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.NamedSharding(mesh, P("data"))
    step = jax.jit(
        jax.shard_map(lambda x: x + ring_psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    )
    x = jax.make_array_from_callback((3,), sharding, lambda index: jnp.ones(3)[index])
    for i in range(2):
        fault_point(f"step {i}")
        x = step(x)
    jax.block_until_ready(x)
    fault_point("step 2")
    with pytest.raises(Exception, match=r"[Pp]rocess 1"):
        jax.block_until_ready(step(x))
