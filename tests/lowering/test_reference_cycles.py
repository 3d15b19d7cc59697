"""What lowering leaves behind: no reference cycles, which would keep a module, its mesh and all devices alive."""

import gc

import jax
import numpy as np
import pytest
from helpers import make_mesh
from jax import lax
from jax.sharding import PartitionSpec as P

from jax_ring import override_lax, ring_all_to_all, ring_ppermute, ring_psum, ring_ragged_all_to_all

X = np.arange(16, dtype=np.float32)
NUMBERS = np.ones(4, np.int32)


def ragged(x):
    return ring_ragged_all_to_all(x, x, NUMBERS, NUMBERS, NUMBERS, NUMBERS, axis_name="i")


BODIES = {
    "one call": lambda x: ring_psum(x, "i"),
    "joined calls": lambda x: ring_psum(x, "i") + ring_psum(2 * x, "i"),
    "calls of two lines": lambda x: ring_psum(
        x + ring_psum(x, "i"), "i"
    ),
    "in a branch": lambda x: lax.cond(x[0] > 0, lambda x: ring_psum(x, "i"), lambda x: x, x),
    "tree": lambda x: ring_psum(x, "i", order="tree"),
    "exchanges": lambda x: ring_all_to_all(ring_ppermute(x, "i", [(0, 1)]), "i", 0, 0, tiled=True),
    "ragged": ragged,
    "lax": lambda x: lax.psum(x, "i"),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("name", BODIES)
def test_no_module_is_part_of_a_cycle(name):
    check(jax.shard_map(BODIES[name], mesh=make_mesh((4,)), in_specs=P("i"), out_specs=P("i"), check_vma=False))


def test_with_axes_of_the_compiler():
    mesh = make_mesh((4, 2), ("i", "auto"))
    body = BODIES["joined calls"]
    check(
        jax.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P("i"), axis_names={"i"}, check_vma=False),
        compiled=True,
    )


def check(mapped, compiled: bool = False) -> None:
    f = jax.jit(mapped)
    gc.collect()
    gc.disable()
    try:
        with override_lax():
            lowered = f.lower(X)
            if compiled:
                lowered.compile()
            del lowered
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found = {type(garbage).__name__ for garbage in gc.garbage}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not {name for name in found if name in ("ModuleContext", "SPMDAxisContext", "Mesh")}
