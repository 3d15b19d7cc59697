"""Schedules along the tree of `order="tree"`, whose ranks may have several terms.

A rank's message has a slot, as large as the result, per term (`shard_tree.terms_of`); the result replaces the first.
"""

from collections.abc import Sequence
from functools import lru_cache

from jax_ring import shard_tree
from jax_ring.schedule.steps import Chunk, Receive, Send, Step, Steps, blocks, check, without_empty


def num_elements_of(num_shards: int, num_ranks: int, num_elements: int) -> int:
    """A rank's elements, for a result of `num_elements`."""
    return num_elements * shard_tree.num_slots(num_shards, num_ranks)


@lru_cache(1024)  # the same for all ranks
def _fold(chunk: Chunk, slot_size: int, num_shards: int, num_ranks: int) -> Receive:
    terms = shard_tree.fold_of(num_shards, num_ranks)
    return Receive(
        chunk,
        tuple(term.rank for term in terms),
        tuple(term.merges for term in terms),
        tuple(term.slot * slot_size for term in terms),
    )


def _terms(chunk: Chunk, slot_size: int, num_shards: int, num_ranks: int, rank: int) -> list[Chunk]:
    """These elements of each term."""
    count = len(shard_tree.terms_of(num_shards, num_ranks, rank))
    return [chunk.moved(slot * slot_size) for slot in range(count)]


def _slot_size(num_ranks: int, num_elements: int, num_shards: int) -> int:
    if num_shards % num_ranks:
        raise ValueError(f"{num_shards} shards cannot be divided evenly among {num_ranks} ranks")
    slots = shard_tree.num_slots(num_shards, num_ranks)
    if num_elements % slots:
        raise ValueError(f"a message of {num_elements} elements does not have {slots} slots of one size")
    return num_elements // slots


def one_shot(num_ranks: int, num_elements: int, rank: int, *, num_shards: int) -> Steps:
    """Ranks send their terms to all others, and fold along the tree."""
    check(num_ranks, num_elements, rank)
    size = _slot_size(num_ranks, num_elements, num_shards)
    whole = Chunk(0, size)
    terms = _terms(whole, size, num_shards, num_ranks, rank)
    sends = tuple(Send(term, peer) for peer in _peers(num_ranks, rank) for term in terms)
    return without_empty([Step(sends=sends), Step((_fold(whole, size, num_shards, num_ranks),))])


def two_shot(num_ranks: int, num_elements: int, rank: int, *, num_shards: int) -> Steps:
    """Ranks send block i of their terms to rank i, which folds along the tree and sends the result to all."""
    check(num_ranks, num_elements, rank)
    size = _slot_size(num_ranks, num_elements, num_shards)
    block, peers = blocks(Chunk(0, size), num_ranks), _peers(num_ranks, rank)
    sends = tuple(Send(term, peer) for peer in peers for term in _terms(block[peer], size, num_shards, num_ranks, rank))
    return without_empty(
        [
            Step(sends=sends),
            Step((_fold(block[rank], size, num_shards, num_ranks),), tuple(Send(block[rank], peer) for peer in peers)),
            Step(tuple(Receive(block[peer], (peer,)) for peer in peers)),
        ]
    )


def _peers(num_ranks: int, rank: int) -> Sequence[int]:
    return [(rank + i) % num_ranks for i in range(1, num_ranks)]


Hosts = tuple[tuple[int, ...], ...]  # ranks of each host, ascending; all hosts have equally many


def two_level(num_ranks: int, num_elements: int, rank: int, *, num_shards: int, hosts: Hosts) -> Steps:
    """Folds on hosts as far as the tree allows, then the hosts' partial sums, a shard per rank.

    Behind its slots a message has as many as the most partial sums of a host. Steps: a reduce-scatter of partial sums
    on hosts, an all-to-all between the i-th ranks of hosts, a fold, an all-gather between these, and one on hosts.
    """
    check(num_ranks, num_elements, rank)
    roots = [shard_tree.roots_of(num_shards, num_ranks, members) for members in hosts]
    num_slots = shard_tree.num_slots(num_shards, num_ranks)
    size = num_elements // (num_slots + max(map(len, roots)))
    host = next(i for i, members in enumerate(hosts) if rank in members)
    local = hosts[host].index(rank)
    shard = blocks(Chunk(0, size), len(hosts[host]))
    part = blocks(shard[local], len(hosts))
    neighbours = [other for other in hosts[host] if other != rank]
    counterparts = [(i, members[local]) for i, members in enumerate(hosts) if i != host]

    def at_root(chunk: Chunk, root: int) -> Chunk:
        return chunk.moved((num_slots + root) * size)

    to_neighbours = [
        Send(term, other)
        for other in neighbours
        for term in _terms(shard[hosts[host].index(other)], size, num_shards, num_ranks, rank)
    ]
    on_host, stack = [], iter(shard_tree.fold_of(num_shards, num_ranks, hosts[host]))
    for i, root in enumerate(roots[host]):
        terms, covered = [], 0
        while covered < root.size:
            terms.append(next(stack))
            covered += shard_tree.terms_of(num_shards, num_ranks, terms[-1].rank)[terms[-1].slot].size
        offsets = tuple((term.slot - num_slots - i) * size for term in terms)
        ranks, merges = tuple(term.rank for term in terms), tuple(term.merges for term in terms)
        on_host.append(Receive(at_root(shard[local], i), ranks, merges, offsets))
    of_all = sorted((root, members[local], i) for members, own in zip(hosts, roots, strict=True)
                    for i, root in enumerate(own))  # fmt: skip
    between = Receive(
        part[host],
        tuple(source for _, source, _ in of_all),
        tuple(shard_tree.merges_of(num_shards, [root for root, _, _ in of_all])),
        tuple((num_slots + i) * size for _, _, i in of_all),
    )
    return without_empty(
        [
            Step(sends=tuple(to_neighbours)),
            Step(
                tuple(on_host),
                tuple(Send(at_root(part[i], root), other) for i, other in counterparts
                      for root in range(len(roots[host]))),
            ),
            Step((between,), tuple(Send(part[host], other) for _, other in counterparts)),
            Step(
                tuple(Receive(part[i], (other,)) for i, other in counterparts),
                tuple(Send(shard[local], other) for other in neighbours),
            ),
            Step(tuple(Receive(shard[hosts[host].index(other)], (other,)) for other in neighbours)),
        ]
    )  # fmt: skip
