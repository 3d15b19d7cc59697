"""Gradient accumulation: a loss differentiated one micro-batch at a time."""

from collections.abc import Callable
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax

from jax_ring import _compat
from jax_ring.collectives.axes import canonical_dimension
from jax_ring.collectives.vmap_axis import accumulator_dtype
from jax_ring.lowering.custom_call.blocks import split_dimension
from jax_ring.options import check_arrays, check_function, integer, path_text
from jax_ring.training.trees import floats, with_float0


def accumulate_gradients(
    fun: Callable[..., Any], num_microbatches: int, *, in_axes: Any = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """A loss differentiated one micro-batch at a time, in the memory of one.

        value_and_grad(accumulate_gradients(loss, 4), "data")(params, images, labels)
        value_and_grad(accumulate_gradients(loss, 4, in_axes=(0, 0, None)), "data")(params, images, labels, scale)

    Its value and gradients are means over the micro-batches, added in a scan, in float32 for 16 bits or fewer, and
    reduced over ranks once. All micro-batches weigh the same; docs/training.md has a mean over all tokens.

    Args:
      fun: a function of parameters and data, a mean over the data. Its communication is repeated for every micro-batch.
      num_microbatches: of equal size.
      in_axes: the split dimension of arguments after the first: an integer for all, or a tuple with an entry for each:
        an integer, None for an argument passed whole, or a pytree prefix of these. The dimension
        stays. Keyword arguments are passed whole. A random key passed whole draws the same numbers each time; a batch
        of keys can be split.
      has_aux: whether `fun` returns a pair, whose second part is stacked over micro-batches and has no derivative.

    Returns:
      A function with the arguments of `fun`. Only the first is differentiable, with `allow_int=True` if it has
        integers.

    Raises:
      NotImplementedError: for derivatives of others, or of auxiliary data.
      ValueError: with vma tracking, for gradients by `jax.grad` of parameters that all ranks share.
      ValueError: if `num_microbatches` is not positive or does not divide the data, or `in_axes` does not fit or splits
        nothing.
      TypeError: if `fun` is no function, `num_microbatches` no integer, or a leaf of `in_axes` neither integer nor
        None.
    """
    check_function("accumulate_gradients", "fun", fun)
    num_microbatches = integer("accumulate_gradients", "num_microbatches", num_microbatches)
    if num_microbatches < 1:
        raise ValueError(f"accumulate_gradients: num_microbatches must be at least 1, got {num_microbatches}")
    check_in_axes("accumulate_gradients", in_axes)

    def accumulated(params, *data, **whole):
        arguments = _Arguments.of(num_microbatches, in_axes, data, whole)

        def of_microbatch(params, own, others):
            positional, keywords = arguments.filled(own | others)
            return _value_and_aux(fun(params, *positional, **keywords), has_aux)

        mean = _differentiable_mean(of_microbatch, params, arguments, num_microbatches)
        try:
            value, aux = mean(params, arguments.microbatches, arguments.others)
        except jax.errors.UnexpectedTracerError as error:
            raise jax.errors.UnexpectedTracerError(
                "accumulate_gradients: fun closes over a value that is being differentiated, or over one of a "
                "transformation that has ended. Only what is in the first argument of fun can be differentiated: put "
                "the value there."
            ) from error
        return (value, aux) if has_aux else value

    return accumulated


class _Arguments(NamedTuple):
    """What a loss gets besides parameters: paths and leaves; by position those that are split, stacked, and others."""

    given: list
    structure: Any
    microbatches: dict[int, jax.Array]
    others: dict[int, jax.Array]

    @classmethod
    def of(cls, num_microbatches: int, in_axes: Any, data: tuple, whole: dict[str, Any]) -> Self:
        dimensions = dimensions_of_cuts(
            "accumulate_gradients", in_axes, data, num_microbatches, "micro-batches", "every micro-batch"
        )
        if not dimensions:
            raise ValueError(
                f"accumulate_gradients: in_axes splits no argument into {num_microbatches} micro-batches. Pass data as "
                "positional arguments after the parameters; keyword arguments are passed whole."
            )
        given, structure = jax.tree.flatten_with_path((data, whole))
        microbatches = {
            i: jnp.moveaxis(split_dimension(given[i][1], dimension, num_microbatches), dimension, 0)
            for i, dimension in dimensions.items()
        }
        others = {i: leaf for i, (_, leaf) in enumerate(given) if isinstance(leaf, jax.Array) and i not in dimensions}
        return cls(given, structure, microbatches, others)

    def filled(self, arrays: dict[int, jax.Array]) -> tuple[tuple, dict[str, Any]]:
        """The arguments for a micro-batch, with its arrays."""
        return jax.tree.unflatten(self.structure, [arrays.get(i, leaf) for i, (_, leaf) in enumerate(self.given)])

    def refuse_derivatives(self, arrays: dict) -> None:
        """Raises NotImplementedError if one of the arrays is differentiated."""
        for i, array in arrays.items():
            if array.perturbed:
                path, leaf = self.given[i]
                raise NotImplementedError(
                    f"accumulate_gradients: the argument at {jax.tree_util.keystr(path[1:])}, of type "
                    f"{jax.typeof(leaf)}, is differentiated, and gradients are accumulated for the first argument "
                    "alone. What every micro-batch gets whole can be put into the first argument. For gradients of "
                    "data that is split, differentiate fun itself."
                )


def _differentiable_mean(
    of_microbatch: Callable, params: Any, arguments: _Arguments, num_microbatches: int
) -> Callable:
    """(params, microbatches, others) -> (mean value, auxiliary data), with a rule that adds gradients in a scan."""

    # Pass the data as an argument: inside jit or checkpoint it is traced, and a custom_vjp must not close over tracers.
    @jax.custom_vjp
    def mean(params, microbatches, others):
        values, aux = lax.map(lambda own: of_microbatch(params, own, others), microbatches)
        return values.mean(), aux

    def forward(params, microbatches, others):
        arguments.refuse_derivatives(microbatches | others)
        params, microbatches, others = jax.tree.map(lambda x: x.value, (params, microbatches, others))

        def step(totals, own):
            out, grads = jax.value_and_grad(of_microbatch, has_aux=True, allow_int=True)(params, own, others)
            added = [t + g.astype(t.dtype) for t, g in zip(totals, floats(grads), strict=True)]
            return added, out

        zeros = [jnp.zeros_like(p, accumulator_dtype(p.dtype)) for p in floats(params)]
        totals, (values, aux) = lax.scan(step, zeros, microbatches)
        return (values.mean(), aux), totals

    def backward(totals, cotangents):
        of_value, of_aux = cotangents
        _refuse_derivatives_of_aux(of_aux)
        scale = of_value / num_microbatches
        scaled = [_scaled(total, scale, p) for total, p in zip(totals, floats(params), strict=True)]
        return with_float0(scaled, params), None, None

    mean.defvjp(forward, backward, symbolic_zeros=True)
    return mean


def _refuse_derivatives_of_aux(cotangents: Any) -> None:
    for path, x in jax.tree_util.tree_leaves_with_path(cotangents):
        if not isinstance(x, jax.custom_derivatives.SymbolicZero):
            raise NotImplementedError(
                f"accumulate_gradients: the leaf at {path_text(path)} of the auxiliary data is differentiated, and "
                "gradients are accumulated for the value alone. Add to the value what has a gradient, and pass the "
                "rest through jax.lax.stop_gradient."
            )


def _scaled(total: jax.Array, scale: jax.Array, p: Any) -> jax.Array:
    """The gradient of a parameter p, from the sum over micro-batches."""
    if missing := sorted(_compat.varying_axes(scale) - _compat.varying_axes(p), key=str):
        raise ValueError(
            f"accumulate_gradients: the loss varies over {missing}, and a parameter of type "
            f"{jax.typeof(p)} does not, so that its gradients would be summed over the ranks in every "
            "micro-batch. Differentiate by jax_ring.value_and_grad, without reduce_in_backward in the "
            f"loss, or cast the parameters before: lax.pcast(params, {tuple(missing)}, to='varying')."
        )
    return (total * scale.astype(total.dtype)).astype(p.dtype)


def _value_and_aux(out: Any, has_aux: bool) -> tuple:
    """What `fun` returned, with None without auxiliary data. Raises TypeError unless it is a micro-batch's loss."""
    is_pair = isinstance(out, tuple | list) and len(out) == 2
    value, aux = out if has_aux and is_pair else (out, None)
    is_scalar = [jnp.shape(x) for x in jax.tree.leaves(value)] == [()] and not isinstance(value, tuple | list | dict)
    if not is_scalar or (has_aux and not is_pair):
        raise TypeError(
            "accumulate_gradients: fun must return a scalar, the loss of a micro-batch, or with has_aux=True a pair of "
            f"it and more; got {jax.tree.map(jax.typeof, value)}. Gradients are taken around it, not in it: "
            'value_and_grad(accumulate_gradients(loss, 2), "data").'
        )
    check_arrays("accumulate_gradients", "the auxiliary data", aux)
    return value, aux


def check_in_axes(function: str, in_axes: Any) -> None:
    """Raises TypeError unless the leaves of `in_axes` are integers or None."""
    if not all(axis is None or type(axis) is int for axis in jax.tree.leaves(in_axes, is_leaf=_is_none)):
        raise TypeError(
            f"{function}: in_axes must be an int, None, or a tuple with an entry for each argument after the "
            f"parameters, whose leaves are ints or None; got {in_axes!r}"
        )


def dimensions_of_cuts(function: str, in_axes: Any, data: tuple, count: int, parts: str, whole: str) -> dict[int, int]:
    """The dimension of each leaf that is cut into `count` parts, by the leaf's position.

    Positions count the leaves of the arguments after the parameters, dimensions from the front. Leaves that are not cut
    are missing.

    parts, whole: words for errors: what the parts are, and who gets an uncut leaf.
    """
    axes, leaves = _axes_of_leaves(function, in_axes, data), jax.tree_util.tree_leaves_with_path(data)
    dimensions = {}
    for i, (axis, (path, leaf)) in enumerate(zip(axes, leaves, strict=True)):
        if axis is None:
            continue
        where, shape = jax.tree_util.keystr(path), jnp.shape(leaf)
        if not shape:
            raise ValueError(
                f"{function}: the argument at {where} after the first is a scalar, which cannot be split. To give it "
                f"to {whole}, give it None in in_axes, or pass it as a keyword argument."
            )
        dimensions[i] = canonical_dimension(function, f"in_axes{where}:", axis, len(shape))
        if shape[dimensions[i]] % count:
            raise ValueError(
                f"{function}: {count} {parts} do not divide dimension {axis} of the argument at {where} after the "
                f"first, of shape {shape}"
            )
    return dimensions


def _axes_of_leaves(function: str, in_axes: Any, data: tuple) -> list[int | None]:
    """The entry of `in_axes` for each leaf."""
    entries = list(in_axes) if isinstance(in_axes, tuple | list) else [in_axes] * len(data)
    if len(entries) != len(data):
        raise ValueError(
            f"{function}: in_axes has {len(entries)} entries for the {len(data)} arguments after the "
            f"parameters: {in_axes}"
        )
    axes: list[int | None] = []

    def note(axis, part):
        axes.extend([axis] * len(jax.tree.leaves(part)))

    for i, (entry, argument) in enumerate(zip(entries, data, strict=True)):
        try:
            jax.tree.map(note, entry, argument, is_leaf=_is_none)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{function}: in_axes[{i}] is {entry}, which is not a prefix of the argument: {error}"
            ) from None
    return axes


def _is_none(x: Any) -> bool:
    return x is None
