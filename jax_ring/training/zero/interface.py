"""What the layouts of a sharded optimizer have in common: its interface, its checks, and how leaves are grouped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jax_ring import _compat, foreign_errors
from jax_ring.collectives.axes import AxisName, axes_of
from jax_ring.collectives.leaves import own_copy
from jax_ring.options import integer, path_text, path_texts

Stage = Literal[1, 2, 3]


def _for_stage_3(*_: Any) -> Any:
    raise ValueError(
        "sharded_optimizer: shard, gather and param_specs are for parameters that are divided: pass stage=3. With "
        "stages 1 and 2 parameters are replicated."
    )


class ShardedOptimizer(NamedTuple):
    """The result of `sharded_optimizer`. Call `init`, `update`, `shard` and `gather` inside `shard_map`.

        init, update, specs = zero.sharded_optimizer(optax.adam(1e-3), "data")[:3]

    With `stage=3`, params are shards: a `ShardedParams`, or a tree of such, or a `ParameterShards`. `update` returns
    updates of the shards, `repartition` takes and returns both, (state, shards), and `specs` takes either.

    Attributes:
      init: (params) -> this rank's state.
      update: (gradients, state, params) -> (updates of all parameters, the same on all ranks; this rank's state).
      specs: (params) -> the PartitionSpecs of the state, for `in_specs` and `out_specs`.
      repartition: (state, params, num_ranks) -> the state, sharded over that many ranks, at least one. On a mesh
        with explicit axes every device has all of it until you place it; so with `unsharded`.
      unsharded: (state, params) -> the state as `tx` itself has it, with the tree of `tx.init(params)`, for functions
        that read it: `optax.contrib.schedule_free_eval_params(optimizer.unsharded(state, params), params)`.
      shares: (params, num_ranks) -> what each rank owns, with `layout="parameter"`; else None, as all ranks own the
        same number of elements.
      shard: (params) -> this rank's shards; with `stage=3`, as the following.
      gather: (shards) -> the parameters, the same on all ranks.
      param_specs: (params) -> the PartitionSpecs of the shards, for `in_specs` and `out_specs`.
    """

    init: Callable[[Any], Any]
    update: Callable[[Any, Any, Any], tuple[Any, Any]]
    specs: Callable[[Any], Any]
    repartition: Callable[[Any, Any, int], Any]
    unsharded: Callable[[Any, Any], Any]
    shares: Callable[[Any, int], Any] | None = None
    shard: Callable[[Any], Any] = _for_stage_3
    gather: Callable[[Any], Any] = _for_stage_3
    param_specs: Callable[[Any], Any] = _for_stage_3


def check_num_ranks(num_ranks: Any) -> int:
    """A number of ranks to shard over as a Python integer. Raises unless it is positive."""
    count = integer("sharded_optimizer", "num_ranks", num_ranks)
    if count < 1:
        raise ValueError(f"sharded_optimizer: num_ranks must be positive, got {count}")
    return count


def check_same_structure(name: str, tree: Any, like: Any, *, likes: str = "parameters", remedy: str = "") -> None:
    """Raises ValueError unless a tree, an argument that errors call `name`, has the structure of another."""
    structure: Any = jax.tree.structure(tree)
    like_structure: Any = jax.tree.structure(like)
    if structure != like_structure:
        paths, expected_paths = (path_texts(x, "") for x in (tree, like))
        missing = [path for path in expected_paths if path not in paths]
        extra = [path for path in paths if path not in expected_paths]
        difference = (
            f"there is none at {', '.join(missing[:4])}" if missing else "",
            f"the {likes} have nothing at {', '.join(extra[:4])}" if extra else "",
        )
        raise ValueError(
            f"sharded_optimizer: the tree of the {name} is not that of the {likes}: "
            f"{'; '.join(filter(None, difference)) or f'{structure} instead of {like_structure}'}.{remedy}"
        )


def check_same_tree(name: str, tree: Any, like: Any, *, likes: str = "parameters", remedy: str = "") -> None:
    """Raises ValueError unless a tree, the argument `name` of `update`, has the structure and the shapes of another."""
    check_same_structure(name, tree, like, likes=likes, remedy=remedy)
    for (path, leaf), other in zip(jax.tree_util.tree_leaves_with_path(tree), jax.tree.leaves(like), strict=True):
        if jnp.shape(leaf) != jnp.shape(other):
            raise ValueError(
                f"sharded_optimizer: in the {name}, the leaf at {path_text(path)} has shape {jnp.shape(leaf)}; the "
                f"shape in the {likes} is {jnp.shape(other)}.{remedy}"
            )


def check_divided_alike(params: Any, axis_name: AxisName) -> None:
    """Raises ValueError, with vma tracking, if other axes divide some of the parameters and not the others."""
    (first, axes), *others = _divided_by(params, axis_name) or [("", [])]
    for path, other in others:
        if other != axes:
            raise ValueError(
                f"sharded_optimizer: the parameter at {first} varies over {axes}, and that at {path} over {other}, "
                f"beside {axis_name!r}. A rank's part of the state has elements of several parameters. Give the "
                "parameters of each kind a sharded_optimizer of their own. Where they vary over an axis 'm', its state "
                'has the specs jax.tree.map(lambda spec: P(("m", *spec)) if spec else spec, optimizer.specs(params)).'
            )


def check_undivided(params: Any, axis_name: AxisName) -> None:
    """Raises ValueError, with vma tracking, if other axes divide parameters."""
    for path, axes in _divided_by(params, axis_name):
        if axes:
            raise ValueError(
                f"sharded_optimizer: the parameter at {path} varies over {axes}, beside {axis_name!r}, which "
                "layout='parameter' does not take. Give such parameters a sharded_optimizer of their own, with "
                "layout='flat'."
            )


def _divided_by(params: Any, axis_name: AxisName) -> list[tuple[str, list]]:
    """For each parameter its path, and the axes over which it varies without those of the ranks."""
    return [
        (path_text(path), sorted(_compat.varying_axes(leaf) - {*axes_of(axis_name)}, key=str))
        for path, leaf in jax.tree_util.tree_leaves_with_path(jax.tree.map(jnp.asarray, params))
    ]


def refuse_further_arguments(error: Exception) -> None:
    """Raises ValueError if what went wrong is that `tx.update` takes arguments that nobody gives it."""
    if isinstance(error, TypeError | ValueError) and foreign_errors.MISSING_KEYWORD.search(str(error)):
        raise ValueError(
            "sharded_optimizer: tx.update gets gradients, state and parameters and no further arguments, such as the "
            f"value of the loss, in neither layout: {error}. Keep this optimizer on every rank, with its whole state: "
            "tx.update(sync_gradients(gradients, axis_name), state, params, value=value), where value is the mean over "
            "the ranks. A learning rate that depends on the loss can be set in the state of optax.inject_hyperparams."
        ) from error


def by_dtype(tree: Any) -> dict[str, list[int]]:
    """For each dtype, the positions of its leaves in jax.tree.leaves."""
    places: dict[str, list[int]] = {}
    for i, leaf in enumerate(jax.tree.leaves(tree)):
        places.setdefault(np.dtype(jnp.result_type(leaf)).name, []).append(i)
    return places


def padded(vector: jax.Array, multiple: int) -> jax.Array:
    """The vector, with zeros up to a multiple of a number of elements; or the vectors of an array's last dimension."""
    return jnp.pad(vector, [*[(0, 0)] * (vector.ndim - 1), (0, -vector.shape[-1] % multiple)])


def on_all_devices(tree: Any) -> Any:
    """Replicates global arrays of a mesh with explicit axes: there JAX refuses to cut a dimension that is divided."""

    def replicated(x):
        sharding = jax.typeof(x).sharding
        if all(axes is None for axes in sharding.spec):
            return x
        return jax.reshard(x, NamedSharding(sharding.mesh, PartitionSpec()))

    return jax.tree.map(replicated, tree)


def vary(state: Any, axis_name: AxisName) -> Any:
    """Casts the state's vectors to varying over the axis. Zeros are invariant otherwise, and the type would change."""
    return jax.tree.map(lambda x: own_copy(x, axis_name) if x.ndim else x, state)


def varying_type(x: Any, axis_name: AxisName) -> Any:
    """The type of x as a value that varies over the axes."""
    # Not by eval_shape: a ShapeDtypeStruct has no mesh in a shard_map that leaves axes to the compiler.
    return jax.make_jaxpr(lambda: own_copy(jnp.zeros(x.shape, x.dtype), axis_name))().out_avals[0]
