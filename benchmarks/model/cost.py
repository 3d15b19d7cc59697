"""Closed formulas for the cost of an all-reduce on a network of equal links.

The model is that of Hockney ("The communication challenge for MPP", Parallel Computing 20, 1994): a message of m bytes
takes alpha + m beta seconds, and folding it another gamma m. A rank sends and receives at the same time, and divides
its bandwidth between the messages of one step. The formulas are those of

  Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 19 (2005);
  Chan, Heimlich, Purkayastha and van de Geijn, "Collective communication: theory, practice, and experience", CCPE 19
  (2007);
  Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69 (2009);
  Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", Parallel Computing
  35 (2009).
"""

import math
from collections.abc import Callable
from typing import NamedTuple


class Link(NamedTuple):
    """The parameters of a class of links: latency, inverse bandwidth, and fold time.

    Attributes:
      alpha: seconds per message.
      beta: seconds per byte sent.
      gamma: seconds per byte folded.
    """

    alpha: float
    beta: float
    gamma: float = 0.0


class Terms(NamedTuple):
    """The costs on the critical path of an all-reduce.

    Attributes:
      steps: messages.
      sent: bytes.
      folded: bytes.
    """

    steps: float
    sent: float
    folded: float

    def seconds(self, link: Link) -> float:
        """The time on links of this class."""
        return self.steps * link.alpha + self.sent * link.beta + self.folded * link.gamma


def reduce_scatter(p: int, n: float) -> Terms:
    """p-1 steps of n/p bytes; the ring's first round."""
    return Terms(p - 1, (p - 1) * n / p, (p - 1) * n / p)


def all_gather(p: int, n: float) -> Terms:
    """p-1 steps of n/p bytes; the ring's second round."""
    return Terms(p - 1, (p - 1) * n / p, 0)


def ring(p: int, n: float) -> Terms:
    """Both rounds. 2(p-1)n/p bytes are the least that an all-reduce between ranks can send (Patarasuk and Yuan)."""
    return Terms(2 * (p - 1), 2 * (p - 1) * n / p, (p - 1) * n / p)


def rank_ordered_ring(p: int, n: float, pieces: int = 8) -> Terms:
    """2(p-1) hops for the first piece, and one step per further piece, or two if results share links with partials."""
    if p == 1:
        return Terms(0, 0, 0)
    steps = 2 * (p - 1) + pieces - 1 if p == 2 else max(2 * (p - 1) + pieces - 1, 2 * pieces + p - 3)
    return Terms(steps, steps * n / pieces, (p + pieces - 2) * n / pieces)


def one_shot(p: int, n: float) -> Terms:
    """One step, in which a rank sends its message p-1 times."""
    return Terms(min(p - 1, 1), (p - 1) * n, (p - 1) * n)


def two_shot(p: int, n: float) -> Terms:
    """Two steps, in each of which a rank sends p-1 blocks of n/p bytes."""
    return Terms(2 * min(p - 1, 1), 2 * (p - 1) * n / p, (p - 1) * n / p)


def halving_doubling(p: int, n: float) -> Terms:
    """2 log2(p') steps between the p' ranks that take part, and two whole messages more if p' is not p."""
    power = 1 << (p.bit_length() - 1)
    extra = int(power != p)
    sent = 2 * (power - 1) * n / power
    return Terms(2 * math.log2(power) + 2 * extra, sent + 2 * extra * n, (power - 1) * n / power + extra * n)


def double_tree(p: int, n: float, pieces: int = 1) -> Terms:
    """Up and down two trees of height floor(log2 p), then the further pieces, 2n/pieces bytes sent for each.

    An inner node receives from two children at a time, so that each level costs twice half a piece. The root of a tree
    of 2^k ranks has only one child, and with fewer than four ranks no rank is as busy.
    """
    height = p.bit_length() - 1
    if height == 0:
        return Terms(0, 0, 0)
    half_level = 0.5 if p == 1 << height else 0
    sent = 2 * (height - half_level) + (pieces - 1) * {2: 1, 3: 1.5}.get(p, 2)
    folded = height - half_level + (pieces - 1) * (0.5 if p == 2 else 1)
    return Terms(2 * height + pieces - 1, sent * n / pieces, folded * n / pieces)


FORMULAS: dict[str, Callable[..., Terms]] = {
    "ring": ring,
    "rank_ordered_ring": rank_ordered_ring,
    "one_shot": one_shot,
    "two_shot": two_shot,
    "double_tree": double_tree,
    "halving_doubling": halving_doubling,
}


def two_level_seconds(p: int, n: float, ranks_per_host: int, host: Link, network: Link, between=ring) -> float:
    """Seconds of both rounds of a ring on each host, and an all-reduce of n/ranks_per_host bytes between hosts."""
    on_host = reduce_scatter(ranks_per_host, n).seconds(host) + all_gather(ranks_per_host, n).seconds(host)
    return on_host + between(p // ranks_per_host, n / ranks_per_host).seconds(network)


def best_pieces(algorithm: str, p: int, n: float, link: Link, max_pieces: int = 1024) -> int:
    """The number of pieces for which a chain or a tree is fastest: the zero of its formula's derivative, rounded."""
    hops = 2 * (p - 1) if algorithm == "rank_ordered_ring" else 2 * (p.bit_length() - 1)
    pieces = math.sqrt(max(hops - 2, 0) * n * link.beta / link.alpha) if link.alpha > 0 else max_pieces
    return max(1, min(max_pieces, round(pieces)))


def busbw(p: int, n: float, seconds: float) -> float:
    """The "bus bandwidth" of nccl-tests in bytes/s: what a ring would carry on each link."""
    return 2 * (p - 1) / p * n / seconds
