"""The primitives: type, jvp, transpose, batching and dead-code rules, all from one template.

They take any number of operands of one dtype and reduce each of them, so that a whole tree is one custom call.
`ring_psum_p` mirrors JAX's `psum_p` (varying to varying; used without vma tracking) and
`ring_psum_invariant_p` JAX's `psum_invariant_p` (varying to invariant; used with it).
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_ring import _compat, lowering


def accumulator_dtype(dtype) -> jnp.dtype:
    """The dtype in which values of `dtype` are added: float32 for floats of 16 bits and fewer, else wide enough."""
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
        return jnp.dtype(jnp.float32)
    if jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 32:
        return jnp.dtype(jnp.int32)
    return jnp.dtype(dtype)


def _sum_over_batch(x, dim: int | None, size: int):
    """The psum over a `vmap` axis, which lies within this device: a sum over `dim`, or `size` times an unbatched x."""
    wide = x.astype(accumulator_dtype(x.dtype))
    total = wide * jnp.asarray(size, wide.dtype) if dim is None else jnp.sum(wide, dim, dtype=wide.dtype)
    return total.astype(x.dtype)


def _jvp(primitive: Primitive, primals: Sequence, tangents: Sequence, **params):
    out = primitive.bind(*primals, **params)
    # A symbolic zero stays one: it needs no communication.
    summed = iter(_bind_nonzero(primitive, tangents, params))
    out_tangents = [
        ad.Zero(jax.typeof(total).to_tangent_aval()) if type(tangent) is ad.Zero else next(summed)
        for total, tangent in zip(out, tangents, strict=True)
    ]
    return out, out_tangents


def _bind_nonzero(primitive: Primitive, values: Sequence, params: dict) -> Sequence:
    values = [v for v in values if type(v) is not ad.Zero]
    return primitive.bind(*values, **params) if values else []


def _transpose(transpose_nonzero: Callable, cotangents: Sequence, *operands, **params):
    done = iter(transpose_nonzero([ct for ct in cotangents if type(ct) is not ad.Zero], params))
    return [
        ad.Zero(operand.aval.to_ct_aval()) if type(ct) is ad.Zero else next(done)
        for ct, operand in zip(cotangents, operands, strict=True)
    ]


def _batch(primitive: Primitive, axis_data, operands: Sequence, dims: Sequence, *, axes, axis_index_groups, options):
    if axis_data.name not in axes:
        return primitive.bind(*operands, axes=axes, axis_index_groups=axis_index_groups, options=options), dims
    if axis_index_groups is not None:
        raise NotImplementedError(
            f"ring_psum over the vmap axis {axis_data.name!r} does not take axis_index_groups "
            f"(got {axis_index_groups}), and neither does lax.psum. Reshape the batch into (groups, ranks) and "
            "use two nested vmaps, or map the axis over devices with shard_map."
        )
    sums = [_sum_over_batch(x, d, axis_data.size) for x, d in zip(operands, dims, strict=True)]
    rest = tuple(axis for axis in axes if axis != axis_data.name)
    if rest:
        sums = primitive.bind(*sums, axes=rest, axis_index_groups=None, options=options)
    return sums, [None] * len(sums)


def _dead_code(used_outputs: list[bool], eqn):
    if not any(used_outputs):
        return [False] * len(eqn.invars), None
    keep = lambda variables: [v for v, used in zip(variables, used_outputs, strict=True) if used]  # noqa: E731
    return used_outputs, eqn.replace(invars=keep(eqn.invars), outvars=keep(eqn.outvars))


def _all_reduce_primitive(name: str, abstract_eval: Callable, transpose_nonzero: Callable) -> Primitive:
    """Makes the primitive of an all-reduce.

    abstract_eval: (aval, *, axes, axis_index_groups) to (aval, effects), for one operand.
    transpose_nonzero: (cotangents, params) to the operands' cotangents.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True

    def abstract_eval_all(*avals, options, **params):
        del options  # they change no type
        results = [abstract_eval(aval, **params) for aval in avals]
        return [aval for aval, _ in results], set().union(*(effects for _, effects in results))

    primitive.def_effectful_abstract_eval(abstract_eval_all)
    primitive.def_impl(lambda *operands, **params: jax.jit(partial(primitive.bind, **params))(*operands))
    ad.primitive_jvps[primitive] = partial(_jvp, primitive)
    ad.primitive_transposes[primitive] = partial(_transpose, transpose_nonzero)
    batching.fancy_primitive_batchers[primitive] = partial(_batch, primitive)
    _compat.register_dead_code_rule(primitive, _dead_code)
    # Not cacheable: a cached lowering does not know where in the user's program the call stands.
    mlir.register_lowering(primitive, lowering.lower, cacheable=False)
    return primitive


ring_psum_p: Primitive = _all_reduce_primitive(
    "ring_psum",
    _compat.abstract_psum,
    # Without vma tracking JAX treats psum as its own transpose.
    lambda cotangents, params: _bind_nonzero(ring_psum_p, cotangents, params),
)

ring_psum_invariant_p: Primitive = _all_reduce_primitive(
    "ring_psum_invariant",
    _compat.abstract_psum_invariant,
    lambda cotangents, params: [lax.pcast(ct, params["axes"], to="varying") for ct in cotangents],
)
