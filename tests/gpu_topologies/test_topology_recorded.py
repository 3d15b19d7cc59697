"""Which calls XLA records in CUDA graphs. XLA reads its flags when a process starts, so each test has its own."""

import os
import pathlib
import subprocess
import sys

import pytest
from command_buffers import FLAGS, Recorded, dump_flags, recorded

TARGET = (pathlib.Path(__file__).parent / "h100.txtpb").read_text()
PROGRAM = """
import sys

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec as P

from jax_ring import ring_psum

topology = topologies.get_topology_desc(platform="cuda", target_config=sys.argv[1], topology="1x1x2")
mesh = topologies.make_mesh(topology, (2,), ("i",))
x = jax.ShapeDtypeStruct((2, 1003), jnp.float32, sharding=NamedSharding(mesh, P("i")))

def loop(x):
    return lax.fori_loop(0, 20, lambda _, y: ring_psum(y, "i") / 2, x)

mapped = jax.shard_map(loop, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False)
compiled = jax.jit(mapped).lower(x).compile()
assert compiled.as_text().count('custom_call_target="jax_ring_all_reduce"') == 1
"""


def compiled_with(flags: str, folder: pathlib.Path) -> Recorded:
    variables = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    variables["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags} {dump_flags(folder)}"
    command = [sys.executable, "-P", "-c", PROGRAM, TARGET]
    completed = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)
    assert completed.returncode == 0, completed.stderr[-3000:]
    return recorded(folder, "jit_loop")


@pytest.mark.parametrize(
    ("flags", "want"),
    [
        # The loop's body is too short: XLA records nothing by default.
        ("", Recorded(0, 0, 0)),
        ("--xla_gpu_graph_min_graph_size=1", Recorded(inside=1, outside=0, loops=0)),
        (FLAGS, Recorded(inside=1, outside=0, loops=1)),
    ],
    ids=["by default", "short sequences", "loops"],
)
def test_a_call_in_a_loop(tmp_path, flags, want):
    assert compiled_with(flags, tmp_path) == want
