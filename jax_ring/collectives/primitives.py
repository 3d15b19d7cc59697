"""The primitives: types, derivatives, batching and dead-code rules from one template.

Each takes any number of operands of one dtype, so a whole tree is one custom call. With `options.num_shards`, operands
have a first dimension for the rank's terms, which results do not have and parameters such as `dimension` do not count.
Primitives with the same result on all ranks come in pairs, as JAX's psum does: `ring_x_p` keeps the operand's type, for
code without vma tracking and for vmap axes; `ring_x_invariant_p` goes from varying to invariant, for mesh axes.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_ring import _compat
from jax_ring.collectives import vmap_axis
from jax_ring.collectives.axes import refuse_mixed_axes
from jax_ring.collectives.shard_sums import spread
from jax_ring.lowering.call import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    PERMUTE,
    REDUCE,
    REDUCE_SCATTER,
    CallSpec,
)
from jax_ring.lowering.passes import merge_equations
from jax_ring.lowering.plan import lower
from jax_ring.lowering.xla import fallback

# ---- The template ---------------------------------------------------------------------------------------------------


class Rules(NamedTuple):
    """The rules in which the primitives differ.

    Attributes:
      abstract_eval: (aval, **params) -> (aval, effects), for one operand; `options` is not among the params.
      transpose: (cotangents, params) -> the operands' cotangents; None if not linear.
      over_vmap_axis: (x, batch dimension, axis size, options, **details) -> (result, batch dimension): a function of
        vmap_axis.py.
      separable: whether several axes equal one axis after the other.
      added_dimensions: dimensions of the result less those of the operand, unless `tiled`.
    """

    abstract_eval: Callable
    transpose: Callable | None
    over_vmap_axis: Callable
    separable: bool = False
    added_dimensions: int = 0


def _make_primitive(name: str, call: CallSpec, rules: Rules) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = True

    def abstract_eval(*avals, options, **params):
        if options.num_shards is not None:
            avals = tuple(map(_compat.without_first_dimension, avals))
        results = [rules.abstract_eval(aval, **params) for aval in avals]
        return [aval for aval, _ in results], set().union(*(effects for _, effects in results))

    if rules.transpose is None:
        jvp = partial(_refuse_jvp, call.function)
    else:
        jvp = partial(_linear_jvp, primitive)
        ad.primitive_transposes[primitive] = partial(_transpose, rules.transpose)
    batch = partial(_batch, primitive, call.function, rules)
    register(primitive, abstract_eval, jvp, batch, partial(lower, call))
    _compat.evaluate_operands_apart(primitive)
    merge_equations.PRIMITIVES.add(primitive)
    return primitive


def register(primitive: Primitive, abstract_eval: Callable, jvp: Callable, batch: Callable, lowering: Callable) -> None:
    """Registers the rules that all primitives of collectives have."""
    primitive.def_effectful_abstract_eval(abstract_eval)
    primitive.def_impl(lambda *operands, **params: jax.jit(partial(primitive.bind, **params))(*operands))
    ad.primitive_jvps[primitive] = jvp
    batching.fancy_primitive_batchers[primitive] = batch
    # Not cacheable, because a cached lowering does not know the user's source line of the call.
    mlir.register_lowering(primitive, lowering, cacheable=False)


def _linear_jvp(primitive: Primitive, primals: Sequence, tangents: Sequence, **params):
    out = primitive.bind(*primals, **params)
    # Symbolic zeros need no communication.
    nonzero = [tangent for tangent in tangents if type(tangent) is not ad.Zero]
    done = iter(primitive.bind(*nonzero, **params) if nonzero else [])
    out_tangents = [
        ad.Zero(jax.typeof(result).to_tangent_aval()) if type(tangent) is ad.Zero else next(done)
        for result, tangent in zip(out, tangents, strict=True)
    ]
    return out, out_tangents


def _refuse_jvp(function: str, primals: Sequence, tangents: Sequence, **params):
    raise NotImplementedError(
        f"Differentiation rule for '{function}' not implemented. Stop the gradient of its operand: "
        f"{function}(jax.lax.stop_gradient(x), ...)."
    )


def _transpose(transpose_nonzero: Callable, cotangents: Sequence, *operands, **params):
    nonzero = [ct for ct in cotangents if type(ct) is not ad.Zero]
    options = params["options"]
    # A cotangent is one value per rank, even if the operand had slots.
    params["options"] = dataclasses.replace(options, num_shards=None)
    of_operands = transpose_nonzero(nonzero, params) if nonzero else []
    if options.num_shards is not None:
        of_operands = spread(of_operands, options.num_shards, params["axes"], params["axis_index_groups"])
    done = iter(of_operands)
    return [
        ad.Zero(operand.aval.to_ct_aval()) if type(ct) is ad.Zero else next(done)
        for ct, operand in zip(cotangents, operands, strict=True)
    ]


def _batch(primitive: Primitive, function: str, rules: Rules, axis_data, operands, dims, **params):
    axes, axis_index_groups = params["axes"], params["axis_index_groups"]
    if axis_data.name not in axes:
        return _batch_other_axis(primitive.bind, rules, operands, dims, **params)
    if axis_index_groups is not None:
        raise NotImplementedError(
            f"{function} over the vmap axis {axis_data.name!r} does not take axis_index_groups "
            f"(got {axis_index_groups}), and neither does its namesake in jax.lax. Reshape the batch into (groups, "
            "ranks) and use two nested vmaps, or map the axis over devices with shard_map."
        )
    rest = tuple(axis for axis in axes if axis != axis_data.name)
    if rest and params["options"].order == "tree":
        refuse_mixed_axes(function, axes, (axis_data.name,))
    if rest and not rules.separable:
        raise NotImplementedError(
            f"{function} over {axes} includes the vmap axis {axis_data.name!r}, which must be the only axis. Use one "
            "call for each axis, or map them all over devices with shard_map."
        )
    details = {name: params[name] for name in params if name not in ("axes", "axis_index_groups", "axis_size")}
    results = [rules.over_vmap_axis(x, d, axis_data.size, **details) for x, d in zip(operands, dims, strict=True)]
    values, result_dims = [value for value, _ in results], [dim for _, dim in results]
    if rest:
        values = primitive.bind(*values, **{**params, "axes": rest})
    return values, result_dims


def _batch_other_axis(bind: Callable, rules: Rules, operands: Sequence, dims: Sequence, **params):
    if params["options"].num_shards is not None:
        # The slots stay in front: other dimension numbers do not count them.
        operands = [jnp.moveaxis(x, 0, 1) if dim == 0 else x for x, dim in zip(operands, dims, strict=True)]
        dims = [dim if dim is None else max(dim - 1, 0) for dim in dims]
    if "dimension" not in params:
        return bind(*operands, **params), dims
    # A batch dimension in front shifts the scattered or gathered dimension; one behind is shifted by it.
    dimension, added = params.pop("dimension"), 0 if params["tiled"] else rules.added_dimensions
    concat = params.pop("concat_dimension", None)
    by_dimension, results, result_dims = defaultdict(list), [None] * len(operands), [None] * len(operands)
    for i, dim in enumerate(dims):
        before = dim is not None and dim <= dimension
        moved: dict[str, int] = {"dimension": dimension + before}
        if concat is not None:
            moved["concat_dimension"] = concat + (dim is not None and dim <= concat)
        by_dimension[tuple(moved.items())].append(i)
        result_dims[i] = dim if dim is None or before else dim + added
    for dimensions, members in by_dimension.items():
        of_members = bind(*(operands[i] for i in members), **dict(dimensions), **params)
        for i, result in zip(members, of_members, strict=True):
            results[i] = result
    return results, result_dims


# ---- Their transposes -----------------------------------------------------------------------------------------------


def _as_varying(cotangents, params):
    return [lax.pcast(ct, params["axes"], to="varying") for ct in cotangents]


def _own_blocks(cotangents, params):
    """The transpose of an all-gather with an invariant result: each rank slices out its block, as in JAX."""
    blocks = {name: params[name] for name in params if name != "options"}
    return [fallback.own_block(ct, **blocks) for ct in _as_varying(cotangents, params)]


def _only_on_root(cotangents, params):
    is_root = lax.axis_index(params["axes"]) == params["root"]
    return [jnp.where(is_root, ct, jnp.zeros_like(ct)) for ct in _as_varying(cotangents, params)]


def _from_root(cotangents, params):
    """The transpose of a reduce: a broadcast, as other ranks' results are constant zeros."""
    # With vma tracking the cotangents vary over the axes, but the result of a broadcast is invariant.
    if not all(_compat.varying_axes(ct).issuperset(params["axes"]) for ct in cotangents):
        return ring_broadcast_p.bind(*cotangents, **params)
    return _as_varying(ring_broadcast_invariant_p.bind(*cotangents, **params), params)


# ---- The primitives -------------------------------------------------------------------------------------------------


Pair = tuple[Primitive, Primitive]  # without and with vma tracking


def _pair(name: str, call: CallSpec, plain: Rules, invariant: Rules) -> Pair:
    return _make_primitive(name, call, plain), _make_primitive(f"{name}_invariant", call, invariant)


_ABSTRACT_INVARIANT = partial(_compat.abstract_invariant, _compat.psum_invariant_p)
_ABSTRACT_MOVED = partial(_compat.with_weak_type, _compat.abstract_psum)


def _reduction(op: str, lax_primitive, over_batch: Callable, transposes: tuple) -> Pair:
    name = f"ring_p{op}"
    to_xla = _compat.lower_as_lax if op == "sum" else partial(fallback.lower_extremum_to_xla, op)
    call = CallSpec(name, ALL_REDUCE, op, partial(to_xla, lax_primitive))
    plain = Rules(_compat.abstract_psum, transposes[0], over_batch, separable=True)
    invariant = plain._replace(abstract_eval=_ABSTRACT_INVARIANT, transpose=transposes[1])
    return _pair(name, call, plain, invariant)


ring_psum_p: Primitive
ring_psum_p, _ = PSUM = _reduction(
    "sum", _compat.psum_p, vmap_axis.psum,
    # Without vma tracking JAX makes psum its own transpose.
    (lambda cotangents, params: ring_psum_p.bind(*cotangents, **params), _as_varying),
)  # fmt: skip
# JAX defines no derivatives of these.
PMAX = _reduction("max", _compat.pmax_p, vmap_axis.pmax, (None, None))
PMIN = _reduction("min", _compat.pmin_p, vmap_axis.pmin, (None, None))

ring_psum_scatter_p: Primitive = _make_primitive(
    "ring_psum_scatter",
    CallSpec("ring_psum_scatter", REDUCE_SCATTER, "sum", partial(_compat.lower_as_lax, _compat.reduce_scatter_p)),
    Rules(
        partial(_compat.abstract_varying, _compat.reduce_scatter_p),
        lambda cotangents, params: ring_all_gather_p.bind(*cotangents, **params),
        vmap_axis.psum_scatter,
        added_dimensions=-1,
    ),
)

_GATHER = Rules(
    partial(_compat.abstract_varying, _compat.all_gather_p),
    lambda cotangents, params: ring_psum_scatter_p.bind(*cotangents, **params),
    vmap_axis.all_gather,
    added_dimensions=1,
)
ring_all_gather_p: Primitive
ring_all_gather_p, ring_all_gather_invariant_p = _pair(
    "ring_all_gather",
    CallSpec("ring_all_gather", ALL_GATHER, "sum", partial(_compat.lower_as_lax, _compat.all_gather_p)),
    _GATHER,
    _GATHER._replace(
        abstract_eval=partial(_compat.abstract_invariant, _compat.all_gather_invariant_p), transpose=_own_blocks
    ),
)

# Always tiled.
ring_all_to_all_p: Primitive = _make_primitive(
    "ring_all_to_all",
    CallSpec("ring_all_to_all", ALL_TO_ALL, "sum", partial(_compat.lower_as_lax, _compat.all_to_all_p)),
    Rules(
        partial(_compat.abstract_varying, _compat.all_to_all_p),
        lambda cotangents, params: ring_all_to_all_p.bind(
            *cotangents,
            **{**params, "dimension": params["concat_dimension"], "concat_dimension": params["dimension"]},
        ),
        vmap_axis.all_to_all,
    ),
)

ring_ppermute_p: Primitive = _make_primitive(
    "ring_ppermute",
    CallSpec("ring_ppermute", PERMUTE, "sum", partial(_compat.lower_as_lax, _compat.ppermute_p)),
    Rules(
        _ABSTRACT_MOVED,
        lambda cotangents, params: ring_ppermute_p.bind(
            *cotangents, **{**params, "perm": tuple((receiver, source) for source, receiver in params["perm"])}
        ),
        vmap_axis.permute,
    ),
)

ring_reduce_p: Primitive = _make_primitive(
    "ring_reduce",
    CallSpec("ring_reduce", REDUCE, "sum", fallback.lower_reduce_to_xla),
    Rules(_compat.abstract_psum, _from_root, vmap_axis.reduce),
)

_BROADCAST = Rules(
    _ABSTRACT_MOVED,
    lambda cotangents, params: ring_reduce_p.bind(*cotangents, **params),
    vmap_axis.broadcast,
)
ring_broadcast_p, ring_broadcast_invariant_p = _pair(
    "ring_broadcast",
    CallSpec("ring_broadcast", BROADCAST, "sum", fallback.lower_broadcast_to_xla),
    _BROADCAST,
    _BROADCAST._replace(
        abstract_eval=partial(_compat.with_weak_type, _ABSTRACT_INVARIANT),
        transpose=_only_on_root,
    ),
)
