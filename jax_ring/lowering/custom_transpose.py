"""A primitive that returns its operands, and whose transpose its caller chooses: any function, or a refusal."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def transposed_by(transpose: Callable, xs: Sequence, *, forward: Callable = list, axes: tuple = ()) -> list:
    """Arrays of floats, unchanged, whose cotangents `transpose` computes; `jax.custom_vjp` would have no forward mode.

    Args:
      transpose: (a list of the results' cotangents) -> the cotangents of `xs`.
      forward: (xs) -> the results, maybe of other types.
      axes: over which transpose communicates.
    """
    return _transposed_p.bind(*xs, transpose=transpose, forward=forward, axes=axes)


def without_reverse_mode(tree: Any, why: str) -> Any:
    """A tree whose floats raise NotImplementedError in reverse mode, where JAX's error speaks of loops.

    why: that there is no reverse mode, and what to do.
    """

    def refuse(cotangents):
        raise NotImplementedError(why)

    return jax.tree.map(lambda x: transposed_by(refuse, [x])[0] if jnp.issubdtype(x.dtype, jnp.inexact) else x, tree)


def _impl(*xs, transpose, forward, axes):
    del transpose, axes
    return forward(xs)


def _abstract_eval(*avals, forward, **_):
    return jax.make_jaxpr(lambda *xs: forward(xs))(*avals).out_avals


def _jvp(primals, tangents, **params):
    out = _transposed_p.bind(*primals, **params)
    return out, _transposed_p.bind(*map(ad.instantiate_zeros, tangents), **params)


def _transpose(cotangents, *operands, transpose, **_):
    del operands
    return transpose([ad.instantiate_zeros(ct) for ct in cotangents])


def _batch(axis_data, xs, dims, *, transpose, axes, **params):
    rest = tuple(axis for axis in axes if axis != axis_data.name)
    if len(rest) < len(axes):
        transpose = partial(_transpose_over_batch, transpose, axis_data, tuple(dims))
    return _transposed_p.bind(*xs, transpose=transpose, axes=rest, **params), dims


def _transpose_over_batch(transpose, axis_data, dims, cotangents):
    """The cotangents, where `transpose` communicates over a batch axis."""
    if any(dim is not None for dim in dims):
        raise ValueError(
            f"reduce_in_backward over the vmap axis {axis_data.name!r} got parameters that are a batch, and their "
            "gradients are taken outside of that vmap: each of the copies would have the sum. Differentiate inside of "
            "the vmap, or give it the parameters with in_axes=None."
        )
    over_batch = jax.vmap(
        lambda: transpose(cotangents), out_axes=None, axis_name=axis_data.name, axis_size=axis_data.size
    )
    # Each term already sums over the batch.
    return [x / axis_data.size for x in over_batch()]


_transposed_p = Primitive("jax_ring_transposed")
_transposed_p.multiple_results = True
_transposed_p.def_impl(_impl)
_transposed_p.def_abstract_eval(_abstract_eval)
ad.primitive_jvps[_transposed_p] = _jvp
ad.primitive_transposes[_transposed_p] = _transpose
batching.fancy_primitive_batchers[_transposed_p] = _batch
mlir.register_lowering(_transposed_p, mlir.lower_fun(_impl, multiple_results=True))
