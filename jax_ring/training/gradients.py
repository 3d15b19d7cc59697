"""Gradients of replicated parameters inside `shard_map`: `value_and_grad`, `grad` and `reduce_in_backward`."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_ring import _compat
from jax_ring.collectives.axes import AxisName, axes_of, axes_of_difference, check_named, num_ranks
from jax_ring.collectives.leaves import own_copy
from jax_ring.training.sync import Reduction


def value_and_grad(
    fun: Callable,
    axis_name: AxisName,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    reduced_in_backward: bool = False,
    **options: Any,
) -> Callable:
    """Like `jax.value_and_grad`, for a loss of which each data-parallel rank computes its part.

    What is differentiated is the mean over the ranks of `fun`, as a function of parameters that all ranks share. If
    `fun` has reduced its value itself (by `weighted_pmean`, say), that mean is its value, and the gradients are those
    of its value. Both are right with vma tracking (`check_vma=True`) and without.

    Args:
      fun: a function of parameters and this rank's data. Returns a scalar, or a scalar and auxiliary data.
      axis_name: the name of a mapped axis, or a sequence of names, as for `ring_psum`.
      argnums: which arguments are parameters, replicated over the axis. A leaf that differs between ranks would be
        given the mean of its gradients too.
      has_aux: whether `fun` returns a pair, whose second part is passed on as it is, from each rank its own.
      reduced_in_backward: whether `fun` passes all its parameters through `reduce_in_backward`, so that nothing is
        left to be reduced but the value.
      **options: `impl`, `wire_dtype`, `bucket_bytes` and `first_bucket_bytes`, as for `sync_gradients`. The value is
        never rounded to `wire_dtype`.

    Returns:
      A function with the arguments of `fun` that returns what `jax.value_and_grad(fun)` does; the value and the
      gradients are the same on all ranks.

    Raises:
      NameError, TypeError, ValueError, jax.errors.JaxRuntimeError: as `sync_gradients` and `jax.value_and_grad`.
    """
    reduction = Reduction(**options)
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    def copies(params):
        return jax.tree.map(lambda x: own_copy(jnp.asarray(x), axis_name), params)

    def value_and_grad_of_mean(*args, **kwargs):
        check_named("value_and_grad", axes_of(axis_name))
        if not reduced_in_backward:
            args = [copies(arg) if i in numbers or i - len(args) in numbers else arg for i, arg in enumerate(args)]
        out, grads = jax.value_and_grad(fun, argnums, has_aux)(*args, **kwargs)
        value, aux = out if has_aux else (out, None)
        # A value that is the same on all ranks counts once: their gradients are parts of it, which add up to its own.
        axes = axes_of_difference(value, axis_name)
        local = (
            None if reduced_in_backward else jax.tree.map(reduction.narrow, grads),
            own_copy(value, axis_name) if axes else None,
        )
        summed_grads, summed_value = reduction.sum("value_and_grad", local, axis_name)
        if axes:
            value = summed_value / num_ranks(axes_of(axis_name))
        if not reduced_in_backward:
            grads = jax.tree.map(lambda s, g: s.astype(g.dtype), summed_grads, grads)
        divisor = num_ranks(axes)
        if divisor > 1:
            grads = jax.tree.map(lambda g: g / divisor, grads)
        return ((value, aux) if has_aux else value), grads

    return value_and_grad_of_mean


def grad(
    fun: Callable, axis_name: AxisName, *, argnums: int | Sequence[int] = 0, has_aux: bool = False, **options: Any
) -> Callable:
    """Like `jax.grad`, for a loss of which each data-parallel rank computes its part: `value_and_grad` without value.

    Arguments, results and errors are those of `value_and_grad`. With `has_aux` it returns gradients and auxiliary data.
    """
    with_value = value_and_grad(fun, axis_name, argnums=argnums, has_aux=has_aux, **options)

    def grad_of_mean(*args, **kwargs):
        value, grads = with_value(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return grad_of_mean


def reduce_in_backward(tree: Any, axis_name: AxisName, **options: Any) -> Any:
    """Parameters as they are; their gradients are summed over the ranks at this place of the backward pass.

    Used on each layer's parameters where the layer uses them, also in the body of a `lax.scan` over layers, it starts
    the reduction of a layer's gradients when they are there, while the layers before it are still to come. JAX itself
    sums, by XLA's all-reduce, the gradients of replicated parameters when vma is tracked: this is the same sum, by
    `ring_psum`, in buckets, in both modes. Differentiate with `value_and_grad(..., reduced_in_backward=True)`, which
    makes the sum a mean. Without vma tracking every parameter has to pass through here: others stay unreduced.

    Args:
      tree: a pytree of parameters, replicated over the axis.
      axis_name, **options: as for `value_and_grad`.

    Raises:
      ValueError: with vma tracking, if a leaf varies over the axis, so that its gradients could only differ too.
      NameError, TypeError, jax.errors.JaxRuntimeError: as `sync_gradients`.
    """
    check_named("reduce_in_backward", axes_of(axis_name))
    reduction = Reduction(**options)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if axes_of_difference(leaf, axis_name) and _compat.check_vma():
            raise ValueError(
                f"reduce_in_backward: the leaf at {jax.tree_util.keystr(path) or 'the root'}, of type "
                f"{jax.typeof(leaf)}, varies over {axis_name!r}; only replicated parameters can be given a common "
                "gradient. Inside jax_ring.value_and_grad pass reduced_in_backward=True to it, which then leaves the "
                "parameters as they are."
            )

    @jax.custom_vjp
    def copies(tree):
        return jax.tree.map(lambda x: own_copy(x, axis_name), tree)

    def forward(tree):
        return copies(tree), None

    def backward(_, cotangents):
        sums = reduction.sum("reduce_in_backward", jax.tree.map(reduction.narrow, cotangents), axis_name)
        return (jax.tree.map(lambda s, ct: s.astype(ct.dtype), sums, cotangents),)

    copies.defvjp(forward, backward)
    return copies(tree)
