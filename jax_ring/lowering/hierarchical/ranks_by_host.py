"""Where groups' ranks lie on hosts, by rank and by mesh position."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jax_ring.lowering.call import Kind, Pairs
from jax_ring.lowering.topology import Groups, Levels, group_table, rank_table


def group_of(levels: Levels) -> np.ndarray:
    """The index of each mesh position's group."""
    return group_table(levels.intra) // np.int32(levels.num_hosts)


class Orders(NamedTuple):
    """Reorders blocks, one per rank, along the leading dimension: functions of blocks and this rank's mesh position.

    Attributes:
      by_place: from rank order to place on a host, then host.
      from_places: the inverse.
      from_hosts: from host, then place, to rank order.
    """

    by_place: Callable
    from_places: Callable
    from_hosts: Callable


def orders_of(groups: Groups, levels: Levels) -> Orders:
    by_host = rank_table(groups)[np.array(levels.intra)].reshape(len(groups), levels.num_hosts, -1)
    by_place = by_host.swapaxes(1, 2).reshape(len(groups), -1)
    orders = by_place, np.argsort(by_place, axis=1), np.argsort(by_host.reshape(len(groups), -1), axis=1)
    return Orders(*(partial(_reorder, order, group_of(levels)) for order in orders))


def _reorder(orders: np.ndarray, group: np.ndarray, blocks: jax.Array, position: jax.Array) -> jax.Array:
    """Blocks in an order.

    Args:
      orders: by group, the old place of each new block.
      group: by mesh position, its group's index.
    """
    order = orders[0]
    if (orders != order).any():
        return jnp.take(blocks, jnp.asarray(orders)[jnp.asarray(group)[position]], axis=0, mode="clip")
    if (order == np.arange(order.size)).all():
        return blocks
    # Most orders are a transpose. XLA can merge it with the operations before and after.
    columns = int(order[1]) if order[1] > 0 and order.size % order[1] == 0 else order.size
    rows = order.size // columns
    if (order == np.arange(order.size).reshape(rows, columns).T.reshape(-1)).all():
        return blocks.reshape(rows, columns, *blocks.shape[1:]).swapaxes(0, 1).reshape(blocks.shape)
    return jnp.take(blocks, order, axis=0, mode="clip")


# ---- Permutations ---------------------------------------------------------------------------------------------------


class SplitPermutation(NamedTuple):
    """A permutation, split between hosts.

    Attributes:
      intra: permutations of places, each done on all hosts.
      inter: pairs of mesh positions across hosts.
      which: by mesh position, the permutation in `intra` whose result it takes, or their number for what crosses hosts.
    """

    intra: list[Pairs]
    inter: list[tuple[int, int]]
    which: np.ndarray


def split_permutation(groups: Groups, levels: Levels, perm: Pairs) -> SplitPermutation:
    intra: list[dict[int, int]] = []  # by receiver
    inter: list[tuple[int, int]] = []
    taken: dict[int, int] = {}  # by mesh position
    places = {position: (i, place) for i, part in enumerate(levels.intra) for place, position in enumerate(part)}
    of_parts: dict[int, dict[int, int]] = {}
    for group in groups:
        for source, receiver in ((group[s % len(group)], group[r % len(group)]) for s, r in perm):
            (part, from_place), (to_part, to_place) = places[source], places[receiver]
            if part == to_part:
                of_parts.setdefault(part, {})[to_place] = from_place
            else:
                inter.append((source, receiver))
    for part, pairs in of_parts.items():
        # One permutation serves several hosts if it includes the pairs of each.
        index = next((i for i, each in enumerate(intra) if _fits(each, pairs)), len(intra))
        if index == len(intra):
            intra.append({})
        intra[index].update(pairs)
        taken.update((levels.intra[part][place], index) for place in pairs)
    if not (intra or inter):
        intra.append({})  # sends nothing; all ranks get zeros
    which = np.full(len(places), len(intra), np.int32)
    which[list(taken)] = list(taken.values())
    return SplitPermutation([tuple((s, r) for r, s in each.items()) for each in intra], inter, which)


def _fits(pairs: dict[int, int], more: dict[int, int]) -> bool:
    """Whether two permutations, by receiver, agree in sources and receivers."""
    source_of = {**pairs, **more}
    return len(set(source_of.values())) == len(source_of) and all(pairs.get(r, s) == s for r, s in more.items())


def crosses_hosts(groups: Groups, levels: Levels, perm: Pairs | None) -> bool:
    """Whether a call in these groups crosses hosts; a permutation may not."""
    return bool(levels.inter) and (perm is None or bool(split_permutation(groups, levels, perm).inter))


def why_not_split(kind: Kind, groups: Groups, levels: Levels, perm: Pairs | None) -> str:
    """Why XLA serves a call across hosts of several ranks; "" if it does not."""
    if kind.is_ragged:
        return "and a ragged all-to-all is not split between them"
    if perm is not None and not split_permutation(groups, levels, perm).intra:
        return "between which every pair of the permutation crosses"
    return ""
