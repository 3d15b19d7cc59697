"""What the layouts of a sharded optimizer have in common: its interface, its checks, and parameters as vectors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jax_ring import _compat, foreign_errors
from jax_ring.collectives.axes import AxisName, axes_of, num_ranks
from jax_ring.collectives.leaves import own_copy
from jax_ring.options import check_arrays, integer, path_text, path_texts, promoted

Stage = Literal[1, 2, 3]


def _for_stage_3(*_: Any) -> Any:
    raise ValueError(
        "sharded_optimizer: shard, gather and param_specs are for parameters that are divided: pass stage=3. With "
        "stages 1 and 2 parameters are replicated."
    )


class ShardedOptimizer(NamedTuple):
    """The result of `sharded_optimizer`. Call `init`, `update`, `shard` and `gather` inside `shard_map`.

        init, update, specs = zero.sharded_optimizer(optax.adam(1e-3), "data")[:3]

    With `stage=3`, params are a partition: a `ShardedParams`, or a tree of such, or a `ParameterShards`. `update`
    returns updates of it, `repartition` takes and returns both, (state, partition), and `specs` takes either.

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
      shard: (params) -> this rank's partition; with `stage=3`, like the two that follow.
      gather: (partition) -> the parameters, the same on all ranks.
      param_specs: (params) -> the PartitionSpecs of the partition, for `in_specs` and `out_specs`.
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
    """Each parameter's path, and the axes over which it varies, without those of the ranks."""
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
    """The positions of leaves in jax.tree.leaves, by dtype."""
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


class Shapes(NamedTuple):
    """Structure, shapes and dtypes of the parameters, which can be compared and be a key."""

    structure: Any
    leaves: tuple[tuple[tuple[int, ...], Any], ...]

    @classmethod
    def of(cls, params: Any) -> Shapes:
        """The shapes of a tree of arrays, or of their types."""
        check_arrays("sharded_optimizer", "the parameters", params)
        leaves, structure = jax.tree.flatten(params)
        return cls(structure, tuple((jnp.shape(x), jnp.result_type(x)) for x in leaves))

    @property
    def params(self) -> Any:
        """The parameters' types."""
        return jax.tree.unflatten(self.structure, [jax.ShapeDtypeStruct(*leaf) for leaf in self.leaves])


@partial(jax.tree_util.register_dataclass, data_fields=["vectors"], meta_fields=["shapes"])
@dataclass(frozen=True)
class ShardedParams:
    """Parameters that are divided over the ranks, with `stage=3`. A pytree, of one array for each dtype.

        optimizer = zero.sharded_optimizer(optax.adam(1e-3), "data", stage=3)
        shards = optimizer.shard(params)  # under shard_map, with out_specs=P("data")

    Attributes:
      vectors: by the name of a dtype, its parameters one after the other, with zeros up to the padded size. Inside of
        `shard_map` the rank's partition; outside all of it. Several of equal shapes can be stacked, as `jax.vmap` does
        it.
      shapes: the structure, shapes and dtypes of the parameters.
    """

    vectors: dict[str, jax.Array]
    shapes: Shapes = field(metadata={"static": True})

    @property
    def like(self) -> Any:
        """The parameters' types: a tree of `jax.ShapeDtypeStruct`."""
        return self.shapes.params

    def whole(self) -> Any:
        """The parameters, outside of `shard_map`; inside of it `ShardedOptimizer.gather` returns them.

        Raises:
          ValueError: if this is the partition of one rank.
        """
        sizes = {name: size_of(self.like, places) for name, places in by_dtype(self.like).items()}
        for name, size in sizes.items():
            if (own := jnp.shape(self.vectors[name])[-1]) < size:
                raise ValueError(
                    f"ShardedParams.whole: these are a rank's shards, {own} of {size} elements of {name}. Inside of "
                    "shard_map use gather of the sharded optimizer."
                )
        return unflat(on_all_devices(self.vectors), self.like)


def is_sharded(x: Any) -> bool:
    """Whether x is a `ShardedParams`, for `is_leaf` of jax.tree."""
    return isinstance(x, ShardedParams)


def is_single(x: Any) -> bool:
    """Whether x is a `ShardedParams` that is not stacked."""
    return is_sharded(x) and all(jnp.ndim(vector) == 1 for vector in x.vectors.values())


def has_shards(tree: Any) -> bool:
    """Whether there is a `ShardedParams` in a tree."""
    return any(map(is_sharded, jax.tree.leaves(tree, is_leaf=is_sharded)))


def map_sharded(f: Callable[[ShardedParams], Any], tree: Any) -> Any:
    """A tree with `f` of each `ShardedParams` in its place; other leaves stay."""
    return jax.tree.map(lambda x: f(x) if is_sharded(x) else x, tree, is_leaf=is_sharded)


def size_of(like: Any, places: list[int]) -> int:
    """The number of elements of some leaves."""
    leaves = jax.tree.leaves(like)
    return sum(int(np.prod(jnp.shape(leaves[i]))) for i in places)


def flat(leaves: list[jax.Array], params: Any, multiple: int) -> dict[str, jax.Array]:
    """One vector of the leaves for each dtype of the parameters. Leaves of several dtypes are promoted to one."""

    def joined(places):
        own = [jnp.ravel(leaves[i]) for i in places]
        return jnp.concatenate(own, dtype=promoted(*(x.dtype for x in own)))

    return {dtype: padded(joined(places), multiple) for dtype, places in by_dtype(params).items()}


def unflat(vectors: dict[str, jax.Array], params: Any) -> Any:
    """A tree like the parameters, from vectors as `flat` makes them; with their further dimensions before."""
    leaves, structure = jax.tree.flatten(params)
    shapes = [jnp.shape(x) for x in leaves]
    for dtype, places in by_dtype(params).items():
        ends = np.cumsum([int(np.prod(shapes[i])) for i in places])
        vector = vectors[dtype]
        for i, end in zip(places, ends, strict=True):
            part = vector[..., end - int(np.prod(shapes[i])) : end]
            leaves[i] = part.reshape((*jnp.shape(vector)[:-1], *shapes[i]))
    return jax.tree.unflatten(structure, leaves)


def own_partition(vectors: dict[str, jax.Array], axis_name: AxisName) -> dict[str, jax.Array]:
    """The rank's partition of vectors that it has whole."""
    rank, p = lax.axis_index(axis_name), num_ranks(axes_of(axis_name))
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, rank * (x.size // p), x.size // p), vectors)
