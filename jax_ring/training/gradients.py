"""Gradients of replicated parameters inside `shard_map`: `value_and_grad`, `grad` and `reduce_in_backward`."""

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, Unpack

import jax
import jax.numpy as jnp

from jax_ring import _compat
from jax_ring.collectives.axes import AxisName, axes_of, axes_of_difference, check_named, num_ranks
from jax_ring.collectives.leaves import own_copy
from jax_ring.training.quantized import Int8Wire
from jax_ring.training.sync import Reduction, ReductionOptions

P = ParamSpec("P")
T = TypeVar("T")  # a pytree: results have the structure of the argument


def value_and_grad(
    fun: Callable[P, Any],
    axis_name: AxisName,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    reduced_in_backward: bool = False,
    **options: Unpack[ReductionOptions],
) -> Callable[P, tuple[Any, Any]]:
    """`jax.value_and_grad` for a loss of which each data-parallel rank computes its part.

    It differentiates the mean of `fun` over the ranks with respect to parameters that all ranks share. If `fun` has
    reduced its value itself (by `weighted_pmean`, say), it differentiates that value. Both are right with vma tracking
    (`check_vma=True`) and without.

    Args:
      fun: a function of parameters and this rank's data. Returns a scalar, or a scalar and auxiliary data.
      axis_name: the name of a mapped axis, or a sequence of names, as for `ring_psum`.
      argnums: which arguments are parameters, replicated over the axis. The gradients of a leaf that differs between
        ranks are averaged too.
      has_aux: whether `fun` returns a pair. Its second part is returned unchanged, by each rank its own.
      reduced_in_backward: whether `fun` passes all its parameters through `reduce_in_backward`, which leaves only the
        value to reduce.
      **options: `impl`, `wire`, `key`, `bucket_bytes` and `first_bucket_bytes`, as for `sync_gradients`. The value is
        never rounded to `wire`. A key is for one step, so pass it where `value_and_grad` is called in the step.

    Returns:
      A function with the arguments of `fun` that returns what `jax.value_and_grad(fun)` does. The value and the
      gradients are the same on all ranks.

    Raises:
      NameError, TypeError, ValueError, jax.errors.JaxRuntimeError: as `sync_gradients` and `jax.value_and_grad`.
    """
    reduction = Reduction.of("value_and_grad", options)
    return _value_and_grad(reduction, fun, axis_name, argnums, has_aux, reduced_in_backward)


def grad(
    fun: Callable[P, Any],
    axis_name: AxisName,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    reduced_in_backward: bool = False,
    **options: Unpack[ReductionOptions],
) -> Callable[P, Any]:
    """`jax.grad` for a loss of which each data-parallel rank computes its part: `value_and_grad` without the value.

    Arguments and errors are those of `value_and_grad`. Returns a function that returns the gradients; with `has_aux`,
    the gradients and the auxiliary data.
    """
    reduction = Reduction.of("grad", options)
    with_value = _value_and_grad(reduction, fun, axis_name, argnums, has_aux, reduced_in_backward)

    def grad_of_mean(*args: P.args, **kwargs: P.kwargs) -> Any:
        value, grads = with_value(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return grad_of_mean


def _value_and_grad(
    reduction: Reduction,
    fun: Callable[P, Any],
    axis_name: AxisName,
    argnums: int | Sequence[int],
    has_aux: bool,
    reduced_in_backward: bool,
) -> Callable[P, tuple[Any, Any]]:
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    if reduced_in_backward:
        _refuse_key(reduction)

    def copies(params):
        return jax.tree.map(lambda x: own_copy(jnp.asarray(x), axis_name), params)

    def value_and_grad_of_mean(*args: P.args, **kwargs: P.kwargs) -> tuple[Any, Any]:
        check_named(reduction.function, axes_of(axis_name))
        arguments: Sequence[Any] = args
        if not reduced_in_backward:
            arguments = [copies(x) if i in numbers or i - len(args) in numbers else x for i, x in enumerate(args)]
        out, grads = jax.value_and_grad(fun, argnums, has_aux)(*arguments, **kwargs)
        value, aux = out if has_aux else (out, None)
        # A value that is the same on all ranks counts once: the ranks' gradients are parts of it, which add up.
        axes = axes_of_difference(value, axis_name)
        divisor, every = num_ranks(axes), num_ranks(axes_of(axis_name))
        local_value = own_copy(value, axis_name) if axes else None
        reduced = reduction.reduce(None if reduced_in_backward else grads, axis_name, divisor, value=local_value)
        if axes:
            value = reduced.value / every
        if not reduced_in_backward:
            grads = reduced.tree
        elif divisor > 1:
            grads = jax.tree.map(lambda g: g / divisor, grads)
        return ((value, aux) if has_aux else value), grads

    return value_and_grad_of_mean


def _refuse_key(reduction: Reduction) -> None:
    if isinstance(reduction.wire, Int8Wire) and reduction.wire.key is not None:
        raise ValueError(
            f"{reduction.function}: gradients that are reduced in the backward pass are rounded to nearest, and a key "
            "has no effect: in a scan, it would be the same for every layer. Leave key out, or reduce after the "
            "backward pass."
        )


def reduce_in_backward(tree: T, axis_name: AxisName, **options: Unpack[ReductionOptions]) -> T:
    """Returns parameters unchanged, and sums their gradients over the ranks at this point of the backward pass.

    Apply it to each layer's parameters where the layer uses them, also in the body of a `lax.scan` over layers. The
    reduction of a layer's gradients then starts as soon as they are computed, before those of the earlier layers. With
    vma tracking JAX sums the gradients of replicated parameters itself, by XLA's all-reduce; this is the same sum, by
    `ring_psum`, in buckets, and in both modes. Differentiate with `value_and_grad(..., reduced_in_backward=True)`: it
    turns the sum into a mean. Without vma tracking pass every parameter through here: others stay unreduced.

    Args:
      tree: a pytree of parameters, replicated over the axis.
      axis_name, **options: as for `value_and_grad`, without `key`.

    Returns:
      A pytree like `tree`, with the same values.

    Raises:
      ValueError: with vma tracking, if a leaf varies over the axis: its gradients cannot be the same on all ranks. Also
        if `key` is given, which would be the same in every step of a scan.
      NameError, TypeError, jax.errors.JaxRuntimeError: as `sync_gradients`.
    """
    check_named("reduce_in_backward", axes_of(axis_name))
    reduction = Reduction.of("reduce_in_backward", options)
    _refuse_key(reduction)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if axes_of_difference(leaf, axis_name) and _compat.check_vma():
            raise ValueError(
                f"reduce_in_backward: the leaf at {jax.tree_util.keystr(path) or 'the root'}, of type "
                f"{jax.typeof(leaf)}, varies over {axis_name!r}; only replicated parameters have one gradient for all "
                "ranks. Inside jax_ring.value_and_grad pass reduced_in_backward=True to it, which then leaves the "
                "parameters as they are."
            )

    @jax.custom_vjp
    def copies(tree):
        return jax.tree.map(lambda x: own_copy(x, axis_name), tree)

    def forward(tree):
        return copies(tree), None

    def backward(_, cotangents):
        return (reduction.reduce(cotangents, axis_name, 1).tree,)

    copies.defvjp(forward, backward)
    return copies(tree)
