"""Gradients of replicated parameters inside `shard_map`: `value_and_grad`, `grad` and `reduce_in_backward`."""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypeVar, Unpack

import jax
import jax.numpy as jnp

from jax_ring import _compat
from jax_ring.collectives.axes import AxisName, axes_of, axes_of_difference, check_axis_name, check_named, num_ranks
from jax_ring.collectives.leaves import own_copy
from jax_ring.lowering.custom_transpose import transposed_by, without_reverse_mode
from jax_ring.options import check_arrays, check_function, integer, path_text
from jax_ring.training.same_bits.parts import SHARD
from jax_ring.training.same_bits.shards import Shards, first_shard
from jax_ring.training.sentinel import Digests, after, check_when, digests
from jax_ring.training.sync import Reduction, ReductionOptions
from jax_ring.training.trees import floats, is_float0, is_inexact, with_float0
from jax_ring.training.wire import Int8Wire

P = ParamSpec("P")
T = TypeVar("T")  # a pytree: results keep the structure of the argument

# Without vma tracking: the axes over which the enclosing `value_and_grad` will sum the gradients of the traced
# function. A user context is part of the key of JAX's caches, so a jitted layer is traced again there. JAX does not
# allow creating one while other threads trace, so create it at import.
_summed_later = jax.make_user_context(frozenset())


def value_and_grad(
    fun: Callable[P, Any],
    axis_name: AxisName,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    reduced_in_backward: bool = False,
    num_shards: int | None = None,
    in_axes: Any = 0,
    reduce_gradients: bool = True,
    check_replicas: Any = None,
    audit: int | None = None,
    step: Any = None,
    **options: Unpack[ReductionOptions],
) -> Callable[P, tuple[Any, Any]]:
    """`jax.value_and_grad` for a loss that is divided over data-parallel ranks.

        value, grads = value_and_grad(loss, "data")(params, x, y)  # under shard_map

    It differentiates the mean of `fun` over the ranks with respect to parameters that all ranks share, or the value of
    `fun` itself where `fun` has reduced it over the axis, as by `weighted_pmean`. Both are right with vma tracking
    (`check_vma=True`) and without. A sum within `fun` over another axis needs vma tracking (docs/training.md),
    unless the parameters are replicated over that axis too and `axis_name` names it.

    Args:
      fun: a function of parameters and this rank's data. Returns a scalar, or a scalar and auxiliary data.
      axis_name: the name of a mapped axis, or a sequence of names.
      argnums: which arguments are parameters, replicated over the axis. Gradients of a leaf that differs between ranks
        are averaged too.
      has_aux: whether `fun` returns a pair. Its second part is returned unchanged, by each rank its own; with
        `num_shards` it is stacked over the rank's shards.
      holomorphic: whether `fun` is holomorphic, for complex parameters.
      allow_int: whether parameters may be integers. Their gradients have dtype float0.
      reduced_in_backward: whether `fun` passes all its parameters through `reduce_in_backward`.
      num_shards: V, for the same bits on any number of ranks p that divides it (docs/any_number_of_devices.md). The
        rank's data is cut into V/p shards, differentiated one by one; sums follow the tree of `order="tree"` and are
        divided by V. `fun` may not communicate over the axis or ask for its index; it has `shard_index()`. With V > p,
        `wire` and `reduced_in_backward` are refused.
      in_axes: with num_shards, which dimension of the arguments that are not in `argnums` is cut: an integer for all,
        or a tuple with an entry for each, whose None stands for an argument that every shard gets whole; an
        entry may be a pytree prefix. Keyword arguments are passed whole.
      reduce_gradients: with num_shards, whether to reduce. If not, the gradients are a `ShardSums`, for
        `sync_gradients`, `allreduce_gradients` and `zero.sharded_optimizer`. The value is reduced in any case.
      check_replicas: a boolean scalar, the same on all ranks, such as `step % 10 == 0`: whether to compare the ranks'
        copies of the parameters, by `jax_ring.check_replicas`.
      audit: with num_shards, k: in each k-th step another rank computes a shard again, and the step fails on all ranks
        if a bit of its value or gradients differs (docs/any_number_of_devices.md).
      step: with audit, the number of the step, an integer scalar, the same on all ranks.
      **options: `ReductionOptions`. The value is never rounded to `wire`. Pass a key where `value_and_grad` is called
        in the step: it is for one.

    Returns:
      A function with the arguments of `fun` that returns what `jax.value_and_grad(fun)` does, the same on all ranks.

    Raises:
      ValueError: with `num_shards`, if the ranks or the data do not divide so, if `fun` uses the axis, for another
        order than "tree", and for options that need V = p. With `audit`, if there is only one rank.
      NameError, TypeError, ValueError, jax.errors.JaxRuntimeError: where `sync_gradients` or `jax.value_and_grad`
        raises them.
    """
    shards = Shards.of("value_and_grad", num_shards, in_axes, reduce_gradients, audit, step, options)
    reduction = Reduction.of("value_and_grad", options)
    argnums = _checked("value_and_grad", fun, axis_name, argnums, check_replicas)
    local = jax.value_and_grad(fun, argnums, has_aux, holomorphic=holomorphic, allow_int=allow_int)
    only_floats = not (allow_int or holomorphic)
    of_mean = _OfMean(
        reduction, local, axis_name, argnums, has_aux, only_floats, reduced_in_backward, shards, check_replicas
    )

    def value_and_grad_of_mean(*args: P.args, **kwargs: P.kwargs) -> tuple[Any, Any]:
        return of_mean.value_and_grad(args, kwargs)

    return value_and_grad_of_mean


def grad(
    fun: Callable[P, Any],
    axis_name: AxisName,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    reduced_in_backward: bool = False,
    num_shards: int | None = None,
    in_axes: Any = 0,
    reduce_gradients: bool = True,
    check_replicas: Any = None,
    audit: int | None = None,
    step: Any = None,
    **options: Unpack[ReductionOptions],
) -> Callable[P, Any]:
    """`jax.grad` for a loss that is divided over data-parallel ranks: `value_and_grad` without the value.

        grads = jax_ring.grad(loss, "data")(params, batch)  # under shard_map

    Takes the arguments of `value_and_grad`, and raises its errors. Returns a function that returns the gradients; with
    `has_aux`, the gradients and the auxiliary data.
    """
    shards = Shards.of("grad", num_shards, in_axes, reduce_gradients, audit, step, options)
    reduction = Reduction.of("grad", options)
    argnums = _checked("grad", fun, axis_name, argnums, check_replicas)
    local = jax.value_and_grad(fun, argnums, has_aux, holomorphic=holomorphic, allow_int=allow_int)
    only_floats = not (allow_int or holomorphic)
    of_mean = _OfMean(
        reduction, local, axis_name, argnums, has_aux, only_floats, reduced_in_backward, shards, check_replicas
    )

    def grad_of_mean(*args: P.args, **kwargs: P.kwargs) -> Any:
        value, grads = of_mean.value_and_grad(args, kwargs)
        return (grads, value[1]) if has_aux else grads

    return grad_of_mean


def _checked(function: str, fun: Any, axis_name: AxisName, argnums: Any, check_replicas: Any) -> int | tuple[int, ...]:
    """Checks arguments of `value_and_grad`. Returns `argnums` as an integer, or as a tuple of integers."""
    check_function(function, "fun", fun)
    check_axis_name(function, axis_name)
    if check_replicas is not None:
        check_when(function, "check_replicas", check_replicas)
    if isinstance(argnums, str) or not isinstance(argnums, Iterable) or getattr(argnums, "ndim", 1) == 0:
        return integer(function, "argnums", argnums)
    numbers = tuple(integer(function, "a number in argnums", number) for number in argnums)
    if not numbers or len(set(numbers)) != len(numbers):
        raise ValueError(f"{function}: argnums must name at least one argument, and each once; got {argnums!r}")
    return numbers


@dataclass(frozen=True)
class _OfMean:
    """The mean of a loss over the ranks, as `value_and_grad` and `grad` differentiate it: their arguments, checked.

    Attributes:
      local: `jax.value_and_grad` of the loss of a rank.
      only_floats: whether integer parameters are refused.
    """

    reduction: Reduction
    local: Callable[..., Any]
    axis_name: AxisName
    argnums: int | Sequence[int]
    has_aux: bool
    only_floats: bool
    reduced_in_backward: bool
    shards: Shards | None
    check_replicas: Any

    def __post_init__(self) -> None:
        if self.reduced_in_backward:
            _refuse_key(self.reduction)

    def value_and_grad(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        function, axis_name = self.reduction.function, self.axis_name
        check_named(function, axes_of(axis_name))
        numbers = (self.argnums,) if isinstance(self.argnums, int) else tuple(self.argnums)
        parameters = [i for i in range(len(args)) if i in numbers or i - len(args) in numbers]
        for i in parameters:
            _check_parameters(function, i, args[i], only_floats=self.only_floats)
        arguments: Sequence[Any] = args
        if not self.reduced_in_backward:
            arguments = [self._copies(x) if i in parameters else x for i, x in enumerate(args)]
        own = None
        if self.check_replicas is not None:
            compared = [args[i] for i in parameters]
            own = digests(function, compared if len(compared) > 1 else compared[0], axis_name, self.check_replicas)
        if self.shards is not None:
            self.shards.check(axis_name, self.reduced_in_backward)
        if self.shards is None or self.reduced_in_backward:
            value, aux, grads = self._by_rank(arguments, kwargs, own)
        else:
            value, aux, grads = self._by_shard(self.shards, arguments, kwargs, parameters, own)
        return ((value, aux) if self.has_aux else value), grads

    def _copies(self, params: Any) -> Any:
        return jax.tree.map(lambda x: own_copy(jnp.asarray(x), self.axis_name), params)

    def _with_aux(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        out, grads = self.local(*args, **kwargs)
        return (out if self.has_aux else (out, None)), grads

    def _by_shard(
        self, shards: Shards, args: Sequence[Any], kwargs: dict[str, Any], parameters: list[int], own: Digests | None
    ) -> tuple[Any, Any, Any]:
        """The value, auxiliary data and gradients. own: the rank's digests, if replicas are compared."""
        sums, aux, findings = shards.differentiate(self._with_aux, args, kwargs, parameters, self.axis_name)
        value, grads = without_reverse_mode(
            shards.reduced(self.reduction, sums, self.axis_name, own, findings),
            f"{shards.function}: what num_shards computes has no reverse mode, because loops add the shards. Take "
            "inner gradients within a shard, by jax.grad in the function that num_shards is for, or differentiate by "
            "jax.jvp.",
        )
        return value, aux, grads

    def _by_rank(self, args: Sequence[Any], kwargs: dict[str, Any], own: Digests | None) -> tuple[Any, Any, Any]:
        """The value, auxiliary data and gradients. own: the rank's digests, if replicas are compared."""
        axis_name, shards = self.axis_name, self.shards
        index = contextlib.nullcontext() if shards is None else SHARD.set(first_shard(axis_name, shards.num_shards))
        with _noted(axis_name, self.reduced_in_backward), index:
            (value, aux), grads = self._with_aux(*args, **kwargs)
        # A value that is the same on all ranks counts once: the ranks' gradients are parts of it and add up.
        axes = axes_of_difference(value, axis_name)
        divisor = num_ranks(axes)
        local_value = own_copy(value, axis_name) if axes else None
        table = None if own is None else own.table
        reduced = replace(self.reduction, after_last=own is not None).reduce(
            None if self.reduced_in_backward else grads, axis_name, divisor, value=(local_value, table)
        )
        total, tables = reduced.value
        if axes:
            value = total
        if not self.reduced_in_backward:
            grads = reduced.tree
        elif divisor > 1:
            grads = jax.tree.map(lambda g: g if is_float0(g) else g / divisor, grads)
        if own is not None:
            ok = own.verdict(tables)
            value, grads = after(value, ok), after(grads, ok)
        return value, aux, grads


_ADVICE = (
    "Of a model give the parameters alone. equinox: params, static = eqx.partition(model, eqx.is_inexact_array), and "
    "eqx.combine(params, static) in the loss. flax: graphdef, params, rest = nnx.split(model, nnx.Param, ...), and "
    "nnx.merge(graphdef, params, rest, copy=True) in the loss."
)


def _check_parameters(function: str, position: int, tree: Any, *, only_floats: bool) -> None:
    """Raises TypeError unless an argument's leaves are arrays (of floats or complex numbers, if required)."""
    try:
        check_arrays(function, f"argument {position}", tree)
    except TypeError as error:
        raise TypeError(f"{error}. {_ADVICE}") from None
    if not only_floats:
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            # Uses JAX's words, so that a search finds them.
            raise TypeError(
                "grad requires real- or complex-valued inputs (input dtype that is a sub-dtype of np.inexact), but "
                f"{function} got {jax.typeof(leaf)} at {path_text(path)} of argument {position}. With allow_int=True "
                f"its gradient is of dtype float0. {_ADVICE}"
            )


def _refuse_key(reduction: Reduction) -> None:
    if isinstance(reduction.wire, Int8Wire) and reduction.wire.key is not None:
        raise ValueError(
            f"{reduction.function}: gradients that are reduced in the backward pass are rounded to nearest, and a key "
            "has no effect: in a scan, it would be the same for every layer. Leave key out, or reduce after the "
            "backward pass."
        )


def _noted(axis_name: AxisName, reduced_in_backward: bool) -> contextlib.AbstractContextManager:
    """A block in which a loss is traced: who sums its gradients over these axes. With vma tracking, types tell."""
    if _compat.check_vma():
        return contextlib.nullcontext()
    axes = frozenset(axes_of(axis_name))
    return _summed_later(_summed_later.value - axes if reduced_in_backward else _summed_later.value | axes)


def _check_summed_once(tree: Any, axis_name: AxisName) -> None:
    """Raises ValueError if gradients that `reduce_in_backward` sums would be summed again, or are not all one sum."""
    advice = (
        "Inside jax_ring.value_and_grad pass reduced_in_backward=True to it, which then leaves the parameters as they "
        "are."
    )
    _refuse_summing_twice(axis_name, advice)
    if not _compat.check_vma():
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if axes_of_difference(leaf, axis_name):
            raise ValueError(
                f"reduce_in_backward: the leaf at {path_text(path)}, of type {jax.typeof(leaf)}, varies over "
                f"{axis_name!r}; only replicated parameters have one gradient for all ranks. {advice}"
            )


def _refuse_summing_twice(axis_name: AxisName, advice: str) -> None:
    """Raises ValueError if the enclosing `value_and_grad` sums gradients over the axis as well."""
    if twice := [axis for axis in axes_of(axis_name) if axis in _summed_later.value]:
        raise ValueError(
            f"reduce_in_backward over {axis_name!r}: the enclosing jax_ring.value_and_grad or grad sums the gradients "
            f"over {twice} as well, which would make them too large by the number of ranks, "
            f"{num_ranks(tuple(twice))}. {advice}"
        )


def reduce_in_backward(tree: T, axis_name: AxisName, **options: Unpack[ReductionOptions]) -> T:
    """Returns parameters unchanged, and sums their gradients over the ranks at this point of the backward pass.

        layer = reduce_in_backward(layer, "data")  # in the loss, where the layer is used, also in a lax.scan

    On GPUs the reduction goes on beside the backward pass of earlier layers, unless `overlap=False`. Differentiate with
    `value_and_grad(..., reduced_in_backward=True)`, which turns the sum into a mean. Without vma tracking pass every
    parameter through here, and none computed from values reduced over the axis (docs/training.md). Do not give the sums
    to `sync_gradients`, `allreduce_gradients` or `zero`.

    Args:
      tree: a pytree of parameters, replicated over the axis.
      axis_name: the name of a mapped axis, or a sequence of names.
      **options: `ReductionOptions`, without `key`.

    Returns:
      A pytree like `tree`, with the same values.

    Raises:
      ValueError: inside `value_and_grad` or `grad` without `reduced_in_backward=True`, which would sum twice, also if
        they differentiate the gradients of an inner one that has it; with vma tracking, if a leaf varies over the axis;
        and for a `key`, which would be the same in every step of a scan.
      NameError, TypeError, jax.errors.JaxRuntimeError: where `sync_gradients` raises them.
    """
    check_named("reduce_in_backward", axes_of(axis_name))
    check_arrays("reduce_in_backward", "tree", tree)
    reduction = Reduction.of("reduce_in_backward", options)
    _refuse_key(reduction)
    _check_summed_once(tree, axis_name)

    tree = jax.tree.map(jnp.asarray, tree)

    def copies(xs):
        return [own_copy(x, axis_name) for x in xs]

    def reduced(cotangents):
        # Refuse if an outer function differentiates the gradients of the function around this call.
        _refuse_summing_twice(
            axis_name,
            "It differentiates the gradients of an inner one with reduced_in_backward=True: leave that and "
            "reduce_in_backward out of the inner one, whose gradients are then reduced after its backward pass, or "
            "stop them by lax.stop_gradient.",
        )
        gradients, count = with_float0(cotangents, tree), num_ranks(axes_of(axis_name))
        return floats(reduction.reduce(gradients, axis_name, 1, headroom=count).tree)

    own = floats(tree)
    if own:
        own = transposed_by(reduced, own, forward=copies, axes=axes_of(axis_name))
    rest = iter(own)
    return jax.tree.map(lambda x: next(rest) if is_inexact(x) else own_copy(x, axis_name), tree)
