"""All-reduce algorithms as data, and an interpreter that runs them, counts their bytes and proves their orders."""

from jax_ring.schedule.algorithms import ALGORITHMS as ALGORITHMS
from jax_ring.schedule.algorithms import all_gather as all_gather
from jax_ring.schedule.algorithms import double_tree as double_tree
from jax_ring.schedule.algorithms import halving_doubling as halving_doubling
from jax_ring.schedule.algorithms import one_shot as one_shot
from jax_ring.schedule.algorithms import rank_ordered_ring as rank_ordered_ring
from jax_ring.schedule.algorithms import reduce_scatter as reduce_scatter
from jax_ring.schedule.algorithms import ring as ring
from jax_ring.schedule.algorithms import two_level as two_level
from jax_ring.schedule.algorithms import two_shot as two_shot
from jax_ring.schedule.interpreter import run as run
