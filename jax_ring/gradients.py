"""Gradients of replicated parameters inside `shard_map`: taken, accumulated over micro-batches, and reduced."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jax_ring import _compat
from jax_ring.arguments import AxisName, axes_of, axes_of_difference, check_named, num_ranks, own_copy
from jax_ring.buckets import Reduction, sync_gradients, sync_with_feedback
from jax_ring.implementations import implementation
from jax_ring.within_device import accumulator_dtype


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


def accumulate_gradients(fun: Callable, num_microbatches: int, *, has_aux: bool = False) -> Callable:
    """The same loss, computed and differentiated one micro-batch at a time, in the memory of one.

    The result is a function like `fun`, to be differentiated by `value_and_grad` with respect to its first argument:
    its value is the mean of `fun` over the micro-batches, and so are its gradients, which are added in a scan, in
    float32 if they have 16 bits or fewer. They are reduced over the ranks once, after it.

        value_and_grad(accumulate_gradients(loss, 4), "data")(params, images, labels)

    Args:
      fun: a function of parameters and data, whose value is a mean over the data. It must not communicate if the ranks
        are to communicate once.
      num_microbatches: into how many parts the data is cut: of every leaf of the arguments after the first, part k is
        block k along the first dimension.
      has_aux: whether `fun` returns a pair, whose second part is stacked over the micro-batches.

    Raises:
      ValueError: if `num_microbatches` is not positive or does not divide the first dimension of the data.
    """
    if num_microbatches < 1:
        raise ValueError(f"accumulate_gradients: num_microbatches must be at least 1, got {num_microbatches}")

    def accumulated(params, *data):
        microbatches = jax.tree_util.tree_map_with_path(partial(_split, num_microbatches), data)

        # Closing over the data says that nothing is differentiated with respect to it; JAX refuses if it is.
        @jax.custom_vjp
        def mean(params):
            values, aux = lax.map(lambda data: _as_pair(fun(params, *data), has_aux), microbatches)
            return values.mean(), aux

        def forward(params):
            def step(total, data):
                out, grads = jax.value_and_grad(fun, has_aux=has_aux)(params, *data)
                return jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, grads), _as_pair(out, has_aux)

            zeros = jax.tree.map(lambda p: jnp.zeros_like(p, accumulator_dtype(p.dtype)), params)
            total, (values, aux) = lax.scan(step, zeros, microbatches)
            return (values.mean(), aux), total

        def backward(total, cotangents):
            scale = cotangents[0] / num_microbatches
            return (jax.tree.map(lambda t, p: (t * scale.astype(t.dtype)).astype(p.dtype), total, params),)

        mean.defvjp(forward, backward)
        value, aux = mean(params)
        return (value, aux) if has_aux else value

    return accumulated


class FeedbackState(NamedTuple):
    """The state of `allreduce_gradients(..., error_feedback=True)`."""

    # What rounding took from this rank's gradients and is still to be sent: like them, with a first dimension of 1,
    # along which `shard_map` puts those of all ranks together.
    residual: Any


def allreduce_gradients(axis_name: AxisName, *, mean: bool = True, error_feedback: bool = False, **options: Any):
    """An optax `GradientTransformation` that replaces this rank's gradients by their mean over the ranks.

    It comes first in an `optax.chain`: `clip_by_global_norm` after it clips the norm of the mean, which is what one
    device with the whole batch would clip.

    Args:
      error_feedback: whether what rounding to `wire_dtype` takes from a rank's gradients is added to those of its next
        step, as by `sync_with_feedback`. The optimizer then has a state that differs between ranks, so that it enters
        and leaves `shard_map` by `feedback_specs`, and its `init` is called inside. Otherwise there is none.
      axis_name, mean, **options: as for `sync_gradients`.

    Raises:
      ImportError: if optax is not installed.
      ValueError: if there is `error_feedback`, but no `wire_dtype` to make up for.
    """
    try:
        import optax
    except ImportError as error:
        raise ImportError(
            "allreduce_gradients makes an optax transformation, and optax is not installed: pip install optax. "
            "Without it, call jax_ring.sync_gradients."
        ) from error
    reduction = Reduction(**options)  # refuses wrong options here rather than in the first step
    if not error_feedback:
        return optax.stateless(lambda updates, params: sync_gradients(updates, axis_name, mean=mean, **options))
    if reduction.wire_dtype is None:
        raise ValueError(
            "allreduce_gradients: error_feedback makes up for rounding to wire_dtype, and there is none. Pass, say, "
            "wire_dtype=jnp.bfloat16."
        )

    def init(params):
        return FeedbackState(jax.tree.map(lambda p: own_copy(jnp.zeros((1, *p.shape), p.dtype), axis_name), params))

    def update(updates, state, params=None):
        del params
        residual = jax.tree.map(lambda r: r[0], state.residual)
        synced, residual = sync_with_feedback(updates, residual, axis_name, mean=mean, **options)
        return synced, FeedbackState(jax.tree.map(lambda r: r[None], residual))

    return optax.GradientTransformation(init, update)


def feedback_specs(state: Any, axis_name: AxisName) -> Any:
    """The PartitionSpecs, for `in_specs` and `out_specs`, of the state of an optax optimizer with error feedback.

        optimizer = optax.chain(allreduce_gradients("data", wire_dtype=jnp.bfloat16, error_feedback=True), adam)
        specs = feedback_specs(jax.eval_shape(optimizer.init, params), "data")
        state = jax.jit(jax.shard_map(optimizer.init, mesh=mesh, in_specs=P(), out_specs=specs))(params)

    What was rounded off differs between ranks; the rest of the state is the same on all of them.
    """

    def is_feedback(node):
        return isinstance(node, FeedbackState)

    own = PartitionSpec(axes_of(axis_name))
    return jax.tree.map(lambda node: own if is_feedback(node) else PartitionSpec(), state, is_leaf=is_feedback)


def weighted_pmean(x: Any, weight: Any, axis_name: AxisName, *, impl: str = "ring") -> Any:
    """The mean of `x` over the ranks of a mapped axis, each counted with its weight: sum of w x / sum of w.

    For batches of which the ranks hold uneven parts: the weighted mean of the ranks' means is the mean over the whole
    batch, if the weights are the numbers of examples. A rank of weight 0 does not count, even if its `x` is not finite.

    Args:
      x: an array, or a pytree of arrays. Floats keep their dtype.
      weight: a scalar, not negative, not zero on all ranks.
      axis_name: as for `ring_psum`.
      impl: "ring" or "lax", as for `sync_gradients`.

    Raises:
      NameError, TypeError, ValueError, jax.errors.JaxRuntimeError: as `ring_psum`.
    """
    check_named("weighted_pmean", axes_of(axis_name))
    weight = jnp.asarray(weight)
    # Not 0 * x, which is NaN for a mean over no examples; and of both branches of a where the gradient is taken.
    weighted = jax.tree.map(lambda x: jnp.where(weight == 0, jnp.zeros_like(x), x) * weight, x)
    local = jax.tree.map(lambda x: own_copy(x, axis_name), (weighted, weight))
    total, total_weight = implementation("weighted_pmean", impl).psum(local, axis_name)
    return jax.tree.map(lambda t, x: (t / total_weight).astype(jnp.result_type(x, float(0))), total, x)


# ---- Parts ----------------------------------------------------------------------------------------------------------


def _split(num_microbatches: int, path, x: jax.Array) -> jax.Array:
    if not x.ndim or x.shape[0] % num_microbatches:
        raise ValueError(
            f"accumulate_gradients: {num_microbatches} micro-batches do not divide the first dimension of the data at "
            f"{jax.tree_util.keystr(path)}, of shape {x.shape}"
        )
    return x.reshape(num_microbatches, x.shape[0] // num_microbatches, *x.shape[1:])


def _as_pair(out: Any, has_aux: bool) -> tuple:
    return out if has_aux else (out, None)
