"""The hook on XLA's compilation without the lowering of `lax`, and all forms of collectives that it may see."""

import contextlib

from jax import lax

from jax_ring.lowering.hlo import hook
from jax_ring.lowering.override_state import Settings, enabled

# XLA's partitioner makes few of the forms that HLO allows. shard_map's collectives have other forms if lax keeps its
# own lowering.


@contextlib.contextmanager
def by_hook_alone():
    hook.register()
    with enabled(Settings(partitioner=True)):
        yield


PAIRS = [[0, 2], [1, 3]]
FORMS = {
    "psum": lambda x: lax.psum((x, x[0] * 2, x[:1, :2]), "b"),
    "psum of both axes": lambda x: lax.psum(x, ("a", "b")),
    "psum in groups": lambda x: lax.psum(x, "b", axis_index_groups=PAIRS),
    "pmax": lambda x: (lax.pmax(x, "a"), lax.pmin(x, "b")),
    "gather": lambda x: (lax.all_gather(x, "b"), lax.all_gather(x, "a", axis=1)),
    "gather tiles": lambda x: (lax.all_gather(x, ("a", "b"), axis=2, tiled=True), lax.all_gather(x.T, "b", tiled=True)),
    "gather in groups": lambda x: lax.all_gather(x, "b", axis_index_groups=PAIRS, axis=1, tiled=True),
    "scatter": lambda x: [lax.psum_scatter(x, "b", scatter_dimension=i, tiled=True) for i in range(3)],
    "scatter of both axes": lambda x: lax.psum_scatter(x, ("a", "b"), scatter_dimension=2, tiled=True),
    "scatter in groups": lambda x: lax.psum_scatter(x, "b", axis_index_groups=PAIRS, scatter_dimension=2, tiled=True),
    "exchange": lambda x: [lax.all_to_all(x, "b", i, j, tiled=True) for i, j in ((0, 0), (1, 2), (2, 0))],
    "exchange in groups": lambda x: lax.all_to_all(x, "b", 2, 0, axis_index_groups=PAIRS, tiled=True),
    "permute": lambda x: (lax.ppermute(x, "b", [(0, 1), (1, 2), (3, 0)]), lax.ppermute(x, "a", [(0, 1), (1, 0)])),
}
