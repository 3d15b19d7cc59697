"""The index of the traced shard or block: `shard_index`, `block_index`."""

import contextlib
import contextvars
import itertools
from collections.abc import Iterator

import jax

from jax_ring.options import setting

_numbers = itertools.count(1)


class TracedIndex:
    """An index with a value while a function is traced.

    JAX's caches know the value by a number, so a jitted layer is traced again for another. Instances are made at
    import: JAX allows no new user context while other threads trace.
    """

    def __init__(self, name: str):
        self._index: contextvars.ContextVar[jax.Array | None] = contextvars.ContextVar(name, default=None)
        self._number = jax.make_user_context(0)

    @contextlib.contextmanager
    def set(self, index: jax.Array) -> Iterator[None]:
        with setting(self._index, index), self._number(next(_numbers)):
            yield

    def get(self, missing: str) -> jax.Array:
        """The value, or a NameError with this text."""
        index = self._index.get()
        if index is None:
            raise NameError(missing)
        return index


SHARD = TracedIndex("shard")
BLOCK = TracedIndex("block")


def shard_index() -> jax.Array:
    """The index of the current shard among those of all ranks: an int32 scalar.

    For the function of `value_and_grad(..., num_shards=V)`, which runs once per shard. A random key from it does not
    depend on the number of ranks:

        key = jax.random.fold_in(key, jax_ring.shard_index())

    Raises:
      NameError: outside of such a function.
    """
    return SHARD.get(
        "shard_index: there is no shard here. It has a value in a function that jax_ring.value_and_grad or grad "
        "differentiates with num_shards=V. Pass num_shards to it, or use jax.lax.axis_index for the rank."
    )


def block_index() -> jax.Array:
    """The index of the current block among those of all ranks: an int32 scalar.

        first = jax_ring.block_index() * len(block)  # the row of the whole table where the block begins

    For the function of `block_sum` and `block_max`, which runs once per block.

    Raises:
      NameError: outside of such a function.
    """
    return BLOCK.get(
        "block_index: there is no block here. It has a value in a function that jax_ring.block_sum or block_max runs "
        "for each block. Use jax.lax.axis_index for the rank."
    )
