"""Simulates the time of an all-reduce on a topology, for up to 100,000 ranks, with jitter and stragglers.

An all-reduce is a list of phases. A phase maps the times at which the ranks are ready to the times at which they are
done, in array operations over ranks. A rank starts a hop when it and the previous rank have finished their last ones.
Messages of the same step share the links, as `Topology.seconds` describes.

There is no event queue. The schedule determines what a rank waits for, so a step of all ranks is one array operation. A
ring of 100,000 ranks has 2 10^10 messages; one event for each, at a microsecond, would take hours. There is no network
graph either: the path of a message follows from the numbers of its ranks.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from model.cost import best_pieces
from model.schedules import double_binary_tree
from model.topology import Topology

MAX_PAIRS = 1 << 24


@dataclass
class Conditions:
    """Deviations from equal ranks.

    Attributes:
      jitter: mean in seconds of the exponentially distributed delay of each hop.
      stragglers: the number of ranks, drawn at random, whose hops take `slowdown` times as long.
      slowdown: the factor for stragglers.
      seed: of the random numbers.
    """

    jitter: float = 0.0
    stragglers: int = 0
    slowdown: float = 2.0
    seed: int = 0


@dataclass
class Machine:
    """A topology under given conditions, for one number of ranks."""

    topology: Topology
    num_ranks: int
    conditions: Conditions
    rng: np.random.Generator = field(init=False)
    slowdown: np.ndarray = field(init=False)  # factor on the time of each rank's hops
    noise_pool: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.conditions.seed)
        self.slowdown = np.ones(self.num_ranks)
        chosen = self.rng.choice(self.num_ranks, min(self.conditions.stragglers, self.num_ranks), replace=False)
        self.slowdown[chosen] = self.conditions.slowdown
        self.noise_pool = self.rng.exponential(self.conditions.jitter, (1 << 18) + self.num_ranks)

    def noise(self, count: int) -> np.ndarray:
        """Random delays of `count` hops, where `count` is at most the number of ranks.

        They are a random window of a pool, because drawing new ones would take most of the time.
        """
        begin = self.rng.integers(len(self.noise_pool) - count)
        return self.noise_pool[begin : begin + count]

    def hop_seconds(self, source: np.ndarray, to: np.ndarray, num_bytes: float, folds: bool) -> np.ndarray:
        """Seconds of each hop of a step, without jitter."""
        seconds = self.topology.seconds(source, to, num_bytes)
        if folds:
            seconds = seconds + num_bytes / self.topology.fold_bandwidth
        return seconds * self.slowdown[to]


@dataclass
class Rings:
    """Simultaneous rings along one axis of a grid of ranks. Each hop is from the previous rank along the axis."""

    grid: tuple[int, int]
    axis: int
    num_bytes: float
    folds: bool
    hops: int

    def hop(self, machine: Machine) -> np.ndarray:
        """Seconds of one hop, by rank."""
        ranks = np.arange(machine.num_ranks).reshape(self.grid)
        return machine.hop_seconds(np.roll(ranks, 1, self.axis).ravel(), ranks.ravel(), self.num_bytes, self.folds)

    def busy_seconds(self, machine: Machine) -> float:
        """Seconds for which the busiest link is occupied."""
        return self.hops * (float(self.hop(machine).max()) + machine.conditions.jitter) if self.hops else 0.0

    def done(self, ready: np.ndarray, machine: Machine) -> np.ndarray:
        if self.hops == 0:
            return ready
        hop = self.hop(machine)
        if machine.conditions.jitter == 0 and np.ptp(ready) == 0:
            # The slowest hop holds up all others. A rank that finishes slightly earlier counts as finishing with it.
            return np.full_like(ready, ready[0] + self.hops * hop.max())
        return self.step_by_step(ready, hop, machine)

    def step_by_step(self, ready: np.ndarray, hop: np.ndarray, machine: Machine) -> np.ndarray:
        """`done` without the shortcut for equal start times."""
        # The rings run along axis 0. The two buffers alternate.
        now = np.ascontiguousarray(np.moveaxis(ready.reshape(self.grid), self.axis, 0))
        hop = np.ascontiguousarray(np.moveaxis(hop.reshape(self.grid), self.axis, 0))
        new = np.empty_like(now)
        noisy = machine.conditions.jitter > 0
        for _ in range(self.hops):
            np.maximum(now[1:], now[:-1], out=new[1:])
            np.maximum(now[0], now[-1], out=new[0])
            new += hop
            if noisy:
                new += machine.noise(new.size).reshape(new.shape)
            now, new = new, now
        return np.moveaxis(now, 0, self.axis).ravel()


@dataclass
class Exchange:
    """One step: a message from each `source` to the `to` at the same index. Ranks may occur several times."""

    source: np.ndarray
    to: np.ndarray
    num_bytes: float
    folds: bool

    def done(self, ready: np.ndarray, machine: Machine) -> np.ndarray:
        hop = machine.hop_seconds(self.source, self.to, self.num_bytes, False)
        arrived = np.maximum(ready[self.source], ready[self.to]) + hop
        done = ready.copy()
        np.maximum.at(done, self.to, arrived)
        count = np.bincount(self.to, minlength=machine.num_ranks)
        if self.folds:
            done += count * (self.num_bytes / machine.topology.fold_bandwidth) * machine.slowdown
        if machine.conditions.jitter > 0:
            done += np.where(count > 0, machine.noise(machine.num_ranks), 0)
        return done


@dataclass
class Chain:
    """A pipeline of pieces that are folded along the chain of all ranks, and whose results go around once more.

    Attributes:
      num_bytes: the size of a piece.
      pieces: the number of pieces.
    """

    num_bytes: float
    pieces: int

    def done(self, ready: np.ndarray, machine: Machine) -> np.ndarray:
        p = machine.num_ranks
        path = np.arange(2 * p - 1) % p
        source, to = np.arange(p), (np.arange(p) + 1) % p
        copy = machine.hop_seconds(source, to, self.num_bytes, False)[path[:-1]]
        fold = machine.hop_seconds(source, to, self.num_bytes, True)[path[:-1]]
        hop = np.where(np.arange(len(copy)) < p - 1, fold, copy)
        # Once results go around, all links carry both kinds, so each further piece costs two hops.
        pieces = self.pieces if p == 2 else min(self.pieces, p)
        index = np.arange(pieces)
        at = np.full(pieces, ready[0])
        done = ready.copy()
        for i, rank in enumerate(path[1:].tolist()):
            at = np.maximum(at, ready[rank])
            if machine.conditions.jitter > 0:
                at = at + machine.rng.exponential(machine.conditions.jitter, pieces)
            # No piece overtakes another: done[c] = max(at[c], done[c-1]) + hop.
            at = np.maximum.accumulate(at - index * hop[i]) + (index + 1) * hop[i]
            done[rank] = at[-1]
        return done + (self.pieces - pieces) * (fold.max() + copy.max() + 2 * machine.conditions.jitter)


@cache
def _tree_edges(num_ranks: int) -> np.ndarray:
    trees = double_binary_tree(num_ranks)
    edges = [(i, node.parent, node.depth) for tree in trees for i, node in enumerate(tree) if node.depth > 0]
    return np.array(edges, int).reshape(-1, 3).T


@dataclass
class Trees:
    """Double binary trees, one pair over each row of `groups`, with the pieces pipelined up and down.

    Attributes:
      groups: ranks, of shape (number of groups, ranks in each).
      num_bytes: the size of a piece, half of which goes over each tree.
      pieces: the number of pieces.
    """

    groups: np.ndarray
    num_bytes: float
    pieces: int

    def edges(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(child, parent, depth of the child) of the edges of all trees."""
        child, parent, depth = _tree_edges(self.groups.shape[1])
        return self.groups[:, child].ravel(), self.groups[:, parent].ravel(), np.tile(depth, len(self.groups))

    def spacing(self, machine: Machine) -> float:
        """Seconds between two pieces: the time in which the busiest rank sends and folds its share of a piece."""
        child, parent, _ = self.edges()
        if len(child) == 0:
            return 0.0
        half = self.num_bytes / 2
        both = machine.hop_seconds(np.r_[child, parent], np.r_[parent, child], half, False)
        folds = np.bincount(parent, minlength=machine.num_ranks) * half / machine.topology.fold_bandwidth
        return float(both.max() + (folds * machine.slowdown).max()) + machine.conditions.jitter

    def busy_seconds(self, machine: Machine) -> float:
        """Seconds for which the busiest rank is occupied."""
        return self.pieces * self.spacing(machine)

    def done(self, ready: np.ndarray, machine: Machine) -> np.ndarray:
        half = self.num_bytes / 2
        child, parent, depth = self.edges()
        levels = np.unique(depth)
        for level in levels[::-1]:
            at = depth == level
            ready = Exchange(child[at], parent[at], half, True).done(ready, machine)
        for level in levels:
            at = depth == level
            ready = Exchange(parent[at], child[at], half, False).done(ready, machine)
        return ready + (self.pieces - 1) * self.spacing(machine)


@dataclass
class TwoLevels:
    """A pipeline of pieces through a phase within hosts, one between hosts, and another one within hosts.

    Hosts and network work on different pieces at the same time.
    """

    on_host: tuple[Rings, Rings]
    between: list[Rings | Trees]
    pieces: int

    def done(self, ready: np.ndarray, machine: Machine) -> np.ndarray:
        first, last = self.on_host
        for phase in (first, *self.between, last):
            ready = phase.done(ready, machine)
        on_host = first.busy_seconds(machine) + last.busy_seconds(machine)
        between = sum(phase.busy_seconds(machine) for phase in self.between)
        return ready + (self.pieces - 1) * max(on_host, between)


Phase = Rings | Exchange | Chain | Trees | TwoLevels


def _ring(p: int, n: float, topology: Topology, pieces: int | None) -> list[Phase]:
    return [Rings((p, 1), 0, n / p, folds, p - 1) for folds in (True, False)]


def _rank_ordered_ring(p: int, n: float, topology: Topology, pieces: int | None) -> list[Phase]:
    pieces = pieces or best_pieces("rank_ordered_ring", p, n, topology.slowest_link(p))
    return [Chain(n / pieces, pieces)]


def _all_pairs(p: int, n: float, folds: bool) -> Exchange:
    if p * p > MAX_PAIRS:
        raise ValueError(f"all pairs of {p} ranks are too many to simulate; the limit is {math.isqrt(MAX_PAIRS)} ranks")
    source, to = np.nonzero(~np.eye(p, dtype=bool))
    return Exchange(source, to, n, folds)


def _one_shot(p: int, n: float, topology: Topology, pieces: int | None) -> list[Phase]:
    return [_all_pairs(p, n, True)]


def _two_shot(p: int, n: float, topology: Topology, pieces: int | None) -> list[Phase]:
    return [_all_pairs(p, n / p, True), _all_pairs(p, n / p, False)]


def _halving_doubling(p: int, n: float, topology: Topology, pieces: int | None) -> list[Phase]:
    power = 1 << (p.bit_length() - 1)
    extra = p - power
    number = np.arange(power)
    rank = np.where(number < extra, 2 * number + 1, number + extra)
    extra_ranks = 2 * np.arange(extra)
    distances = [1 << i for i in range(power.bit_length() - 1)]
    halving = [Exchange(rank[number ^ d], rank, n / (2 * d), True) for d in distances]
    doubling = [Exchange(rank[number ^ d], rank, n / (2 * d), False) for d in reversed(distances)]
    if extra == 0:
        return [*halving, *doubling]
    return [
        Exchange(extra_ranks, extra_ranks + 1, n, True),
        *halving,
        *doubling,
        Exchange(extra_ranks + 1, extra_ranks, n, False),
    ]


def _double_tree(p: int, n: float, topology: Topology, pieces: int | None) -> list[Phase]:
    pieces = pieces or best_pieces("double_tree", p, n, topology.slowest_link(p))
    return [Trees(np.arange(p).reshape(1, p), n / pieces, pieces)]


def _two_level(between: str) -> Callable[[int, float, Topology, int | None], list[Phase]]:
    def phases(p: int, n: float, topology: Topology, pieces: int | None) -> list[Phase]:
        on_host = min(topology.ranks_per_host, p)
        if p % on_host:
            raise ValueError(f"{p} ranks do not fill hosts of {on_host}; give a multiple of {on_host}")
        hosts, pieces = p // on_host, pieces or 1
        shard = n / pieces / on_host
        grid = hosts, on_host
        if between == "ring":
            middle: list[Rings | Trees] = [Rings(grid, 0, shard / hosts, folds, hosts - 1) for folds in (True, False)]
        else:
            tree_pieces = best_pieces("double_tree", hosts, shard, topology.network_link())
            middle = [Trees(np.arange(p).reshape(grid).T, shard / tree_pieces, tree_pieces)]
        scatter, gather = (Rings(grid, 1, shard, folds, on_host - 1) for folds in (True, False))
        return [TwoLevels((scatter, gather), middle, pieces)]

    return phases


PHASES: dict[str, Callable[[int, float, Topology, int | None], list[Phase]]] = {
    "ring": _ring,
    "rank_ordered_ring": _rank_ordered_ring,
    "one_shot": _one_shot,
    "two_shot": _two_shot,
    "halving_doubling": _halving_doubling,
    "double_tree": _double_tree,
    "two_level": _two_level("ring"),
    "two_level_tree": _two_level("double_tree"),
}


def simulate(
    algorithm: str,
    num_ranks: int,
    num_bytes: float,
    topology: Topology,
    conditions: Conditions | None = None,
    *,
    pieces: int | None = None,
    ready: np.ndarray | None = None,
) -> np.ndarray:
    """The times in seconds at which each rank has the result. Their maximum is the time of the all-reduce.

    Args:
      algorithm: one of `PHASES`.
      num_ranks: up to about 100,000; up to 4096 for `one_shot` and `two_shot`, which send a message per pair of ranks.
      num_bytes: message size of each rank.
      topology: see `load`.
      conditions: jitter and stragglers; none by default.
      pieces: the number of pieces of a pipelined algorithm. By default the best by the closed formula for a chain and
        a tree, and one for two levels. The other algorithms ignore it.
      ready: the start time of each rank; by default all 0.

    Raises:
      ValueError: if there is no such algorithm, or it does not support this number of ranks.
    """
    if algorithm not in PHASES:
        raise ValueError(f"no algorithm {algorithm!r}: choose one of {', '.join(PHASES)}")
    if num_ranks < 1 or num_bytes < 0:
        raise ValueError(f"there must be one rank or more, and 0 bytes or more; got {num_ranks} and {num_bytes}")
    times = np.zeros(num_ranks) if ready is None else np.array(ready, float)
    if num_ranks == 1:
        return times
    times += topology.launch_latency
    machine = Machine(topology, num_ranks, conditions or Conditions())
    for phase in PHASES[algorithm](num_ranks, float(num_bytes), topology, pieces):
        times = phase.done(times, machine)
    return times
