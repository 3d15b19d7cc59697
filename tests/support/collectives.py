"""Every collective of jax_ring, paired with its lax equivalent and a numpy oracle; tests of all of them at once."""

import inspect
from collections.abc import Callable, Collection
from functools import partial, wraps
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import RANKS, assert_same_trees, ours_and_lax, rank_fold, sharded
from jax import lax
from tiers import full_but

import jax_ring
from jax_ring.lowering.passes import combiner

# Shape of a rank's operand. Both dimensions are divisible by 8 ranks.
SHAPE = (RANKS, 2 * RANKS)


# Ranks 3 and 7 receive nothing, and ranks 0 and 1 send to none.
PERM = [(5, 0), (4, 1), (7, 2), (2, 6), (6, 5), (3, 4)]


class Pair(NamedTuple):
    """A collective, its lax equivalent, both called as f(x, axis_name, **kwargs), and the expected results."""

    ring: Callable
    lax: Callable
    oracle: Callable  # maps the stacked operands of all ranks to their stacked results
    differentiable: bool = True


def vary(x, axis_name):
    """x cast to vary over the axes; x itself without vma tracking."""
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    manual = jax.sharding.get_abstract_mesh().manual_axes
    missing = tuple(axis for axis in axes if axis in manual and axis not in jax.typeof(x).mat.varying)
    return lax.pcast(x, missing, to="varying") if missing and jax_ring._compat.check_vma() else x


def lax_reduce(x, axis_name, *, root):
    is_root = lax.axis_index(axis_name) == root
    totals = jax.tree.map(lambda leaf: vary(leaf, axis_name), lax.psum(x, axis_name))
    return jax.tree.map(lambda total: jnp.where(is_root, total, jnp.zeros_like(total)), totals)


def lax_broadcast(x, axis_name, *, root):
    is_root = lax.axis_index(axis_name) == root
    masked = jax.tree.map(lambda leaf: jnp.where(is_root, leaf, jnp.zeros_like(leaf)), x)
    return jax.tree.map(lambda total, leaf: total.astype(leaf.dtype), lax.psum(masked, axis_name), x)


def replicated(result, ranks=RANKS):
    return np.stack([result] * ranks)


def extremum(values, better):
    """The fold of np.maximum or np.minimum, with -0 smaller than +0."""
    wide = values if values.dtype.itemsize >= 4 else values.astype(np.float32)
    result = better.reduce(wide, axis=0)
    if wide.dtype.kind == "f":
        # The maximum of zeros is -0 only if all are -0; the minimum is -0 if any is.
        if better is np.maximum:
            negative = (np.signbit(wide) | (wide != 0)).all(0)
        else:
            negative = (np.signbit(wide) & (wide == 0)).any(0)
        result = np.where(result == 0, np.where(negative, -0.0, 0.0).astype(wide.dtype), result)
    return replicated(result.astype(values.dtype), len(values))


def blocks(total, dimension, tiled, ranks):
    parts = np.split(total, ranks, dimension)
    return np.stack(parts if tiled else [part.squeeze(dimension) for part in parts])


def gathered(values, axis, tiled):
    return replicated(np.concatenate(values, axis) if tiled else np.stack(values, axis), len(values))


def on_root(total, root, ranks):
    result = np.zeros((ranks, *total.shape), total.dtype)
    result[root] = total
    return result


def scatter(dimension, tiled) -> Pair:
    arguments = {"scatter_dimension": dimension, "tiled": tiled}
    return Pair(
        partial(jax_ring.ring_psum_scatter, **arguments),
        partial(lax.psum_scatter, **arguments),
        lambda values: blocks(rank_fold(values), dimension, tiled, len(values)),
    )


def gather(axis, tiled, **more) -> Pair:
    arguments = {"axis": axis, "tiled": tiled, **more}
    return Pair(
        partial(jax_ring.ring_all_gather, **arguments),
        partial(lax.all_gather, **arguments),
        lambda values: gathered(values, axis, tiled),
    )


def exchange(split, concat, tiled) -> Pair:
    arguments = {"split_axis": split, "concat_axis": concat, "tiled": tiled}

    def oracle(values):
        parts = [np.split(value, len(values), split) for value in values]
        join = np.concatenate if tiled else lambda parts, axis: np.stack([part.squeeze(split) for part in parts], axis)
        return np.stack([join([own[rank] for own in parts], concat) for rank in range(len(values))])

    return Pair(
        partial(jax_ring.ring_all_to_all, **arguments),
        partial(lax.all_to_all, **arguments),
        oracle,
    )


def permutation(perm) -> Pair:
    def oracle(values):
        result = np.zeros_like(values)
        for source, receiver in perm:
            result[receiver] = values[source]
        return result

    return Pair(partial(jax_ring.ring_ppermute, perm=perm), partial(lax.ppermute, perm=perm), oracle)


COLLECTIVES = {
    "psum": Pair(jax_ring.ring_psum, lax.psum, lambda values: replicated(rank_fold(values), len(values))),
    "pmean": Pair(jax_ring.ring_pmean, lax.pmean, lambda values: replicated(rank_fold(values) / len(values))),
    "pmax": Pair(jax_ring.ring_pmax, lax.pmax, lambda values: extremum(values, np.maximum), differentiable=False),
    "pmin": Pair(jax_ring.ring_pmin, lax.pmin, lambda values: extremum(values, np.minimum), differentiable=False),
    "psum_scatter": scatter(0, False),
    "psum_scatter_tiled": scatter(0, True),
    "psum_scatter_tiled_1": scatter(1, True),
    "all_gather": gather(0, False),
    "all_gather_1": gather(1, False),
    "all_gather_last": gather(-1, False),
    "all_gather_tiled": gather(0, True),
    "all_gather_tiled_1": gather(1, True),
    "all_gather_invarying": gather(0, False, to="invarying"),
    "all_gather_invarying_tiled": gather(1, True, to="invarying"),
    "reduce": Pair(
        partial(jax_ring.ring_reduce, root=3),
        partial(lax_reduce, root=3),
        lambda values: on_root(rank_fold(values), 3, len(values)),
    ),
    "broadcast": Pair(
        partial(jax_ring.ring_broadcast, root=5), partial(lax_broadcast, root=5), lambda values: replicated(values[5])
    ),
    # Others are in test_exchange.py.
    "all_to_all": exchange(1, 0, tiled=True),
    "ppermute": permutation(PERM),
}


def every_collective(
    where: Callable[[str, Pair], bool] = lambda name, pair: True, plain: Collection[str] = COLLECTIVES
):
    """Parametrizes a test over the collectives for which `where(name, pair)` holds. The plain command runs `plain`."""
    chosen = those(where)
    values = full_but(chosen.values(), [chosen[name] for name in plain or chosen if name in chosen])
    return pytest.mark.parametrize("collective", values, ids=chosen.keys())


def those(where: Callable[[str, Pair], bool]) -> dict[str, Pair]:
    """The collectives for which `where(name, pair)` holds."""
    return {name: pair for name, pair in COLLECTIVES.items() if where(name, pair)}


def a_subtest_for_each_collective(where: Callable[[str, Pair], bool] = lambda name, pair: True):
    """As `every_collective`, in one test: for what takes less time than pytest takes for a test."""

    def decorate(test):
        @wraps(test)
        def for_each(subtests, **fixtures):
            for name, pair in those(where).items():
                with subtests.test(name):
                    test(collective=pair, **fixtures)

        own = [p for p in inspect.signature(test).parameters.values() if p.name != "collective"]
        fixture = inspect.Parameter("subtests", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        for_each.__signature__ = inspect.Signature([fixture, *own])
        return for_each

    return decorate


def assert_family_matches_lax(subtests, body, x, where=lambda name, pair: True, *, check_vma, rtol=0.0, **options):
    """Asserts that `body(fun, x, pair)` under shard_map has the same results and types for ours and for lax's.

    All collectives are in one program, which compiles in a third of the time. Each has a subtest, and an operand of its
    own: equal ones would be sent once. With vma, calls of one kind are joined. Without, they are apart, as in a program
    of one collective.
    """
    pairs = those(where)
    operands = {name: np.roll(x, i, -1) for i, name in enumerate(pairs)}
    results, types = [], []
    for side in ours_and_lax(0, 1):

        def program(operands, side=side):
            out = {}
            for name, operand in operands.items():
                try:
                    out[name] = body(pairs[name][side], operand, pairs[name])
                except Exception as error:
                    error.add_note(f"in {name}")
                    raise
            types.append(jax.tree.map(jax.typeof, out))
            return out

        with pytest.MonkeyPatch.context() as patch:
            if not check_vma:
                patch.setattr(combiner, "COMBINE_THRESHOLD_COUNT", 1)
            results.append(sharded(program, check_vma=check_vma, **options)(operands))
    for name in pairs:
        with subtests.test(name):
            assert types[0][name] == types[-1][name]
            assert_same_trees(*(result[name] for result in results), rtol=rtol)


def is_sum(name: str, pair: Pair) -> bool:
    return name.startswith(("psum", "pmean", "reduce"))


def supports_groups(name: str, pair: Pair) -> bool:
    return name not in ("reduce", "broadcast", "ppermute") and "invarying" not in name
