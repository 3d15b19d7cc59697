"""The index of the shard or block that is being traced, which a function can ask for: `shard_index`, `block_index`."""

import contextlib
import contextvars
import itertools
from collections.abc import Iterator

import jax

_numbers = itertools.count(1)


class TracedIndex:
    """An index that has a value while a function is traced.

    JAX's caches know the value by a number, so that a jitted layer is traced again for another one. JAX does not allow
    creating a user context while other threads trace, so instances are made at import.
    """

    def __init__(self, name: str):
        self._index: contextvars.ContextVar[jax.Array | None] = contextvars.ContextVar(name, default=None)
        self._number = jax.make_user_context(0)

    @contextlib.contextmanager
    def set(self, index: jax.Array) -> Iterator[None]:
        """For the time of tracing: the value."""
        token = self._index.set(index)
        try:
            with self._number(next(_numbers)):
                yield
        finally:
            self._index.reset(token)

    def get(self, missing: str) -> jax.Array:
        """The value. Raises NameError with this text if there is none."""
        index = self._index.get()
        if index is None:
            raise NameError(missing)
        return index


SHARD = TracedIndex("shard")
BLOCK = TracedIndex("block")


def shard_index() -> jax.Array:
    """The index of the shard whose loss is being computed, among the shards of all ranks: an int32 scalar.

    For the function that `value_and_grad(..., num_shards=V)` differentiates, which runs once for each of V shards. A
    random key made of it does not depend on the number of ranks:

        key = jax.random.fold_in(key, jax_ring.shard_index())

    Raises:
      NameError: outside of such a function.
    """
    return SHARD.get(
        "shard_index: there is no shard here. It has a value in a function that jax_ring.value_and_grad or grad "
        "differentiates with num_shards=V. Pass num_shards to it, or use jax.lax.axis_index for the rank."
    )


def block_index() -> jax.Array:
    """The index of the block that is being computed, among the blocks of all ranks: an int32 scalar.

    For the function of `block_sum` and `block_max`, which runs once for each of B blocks.

    Raises:
      NameError: outside of such a function.
    """
    return BLOCK.get(
        "block_index: there is no block here. It has a value in a function that jax_ring.block_sum or block_max runs "
        "for each block. Use jax.lax.axis_index for the rank."
    )
