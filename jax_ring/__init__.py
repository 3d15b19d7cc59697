"""Collectives for JAX as XLA custom calls: bitwise reproducible, drop-ins for those of `jax.lax`."""

from jax_ring import zero as zero
from jax_ring.buckets import plan_buckets as plan_buckets
from jax_ring.buckets import sync_gradients as sync_gradients
from jax_ring.buckets import sync_with_feedback as sync_with_feedback
from jax_ring.collectives import ring_all_gather as ring_all_gather
from jax_ring.collectives import ring_broadcast as ring_broadcast
from jax_ring.collectives import ring_pmax as ring_pmax
from jax_ring.collectives import ring_pmean as ring_pmean
from jax_ring.collectives import ring_pmin as ring_pmin
from jax_ring.collectives import ring_psum as ring_psum
from jax_ring.collectives import ring_psum_scatter as ring_psum_scatter
from jax_ring.collectives import ring_reduce as ring_reduce
from jax_ring.explanation import Explanation as Explanation
from jax_ring.explanation import explain as explain
from jax_ring.gradients import accumulate_gradients as accumulate_gradients
from jax_ring.gradients import allreduce_gradients as allreduce_gradients
from jax_ring.gradients import feedback_specs as feedback_specs
from jax_ring.gradients import grad as grad
from jax_ring.gradients import reduce_in_backward as reduce_in_backward
from jax_ring.gradients import value_and_grad as value_and_grad
from jax_ring.gradients import weighted_pmean as weighted_pmean
from jax_ring.override import Override as Override
from jax_ring.override import override_lax as override_lax
from jax_ring.replicas import assert_replicated as assert_replicated
from jax_ring.replicas import broadcast_params as broadcast_params
from jax_ring.runtime import __version__ as __version__
