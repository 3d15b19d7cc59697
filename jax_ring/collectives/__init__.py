"""What a user calls: drop-ins for the collectives of `jax.lax`, and the JAX primitives behind them."""

from jax_ring.collectives.exchange import ring_all_to_all as ring_all_to_all
from jax_ring.collectives.exchange import ring_broadcast as ring_broadcast
from jax_ring.collectives.exchange import ring_pbroadcast as ring_pbroadcast
from jax_ring.collectives.exchange import ring_ppermute as ring_ppermute
from jax_ring.collectives.exchange import ring_pshuffle as ring_pshuffle
from jax_ring.collectives.exchange import ring_pswapaxes as ring_pswapaxes
from jax_ring.collectives.ragged import ring_ragged_all_to_all as ring_ragged_all_to_all
from jax_ring.collectives.reductions import ring_pmax as ring_pmax
from jax_ring.collectives.reductions import ring_pmean as ring_pmean
from jax_ring.collectives.reductions import ring_pmin as ring_pmin
from jax_ring.collectives.reductions import ring_psum as ring_psum
from jax_ring.collectives.reductions import ring_reduce as ring_reduce
from jax_ring.collectives.scatter_gather import ring_all_gather as ring_all_gather
from jax_ring.collectives.scatter_gather import ring_psum_scatter as ring_psum_scatter
from jax_ring.collectives.shard_sums import ShardSums as ShardSums
