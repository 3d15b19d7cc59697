"""Data-parallel training: gradients that are reduced in buckets, sharded optimizers, and copies that must not drift."""

from jax_ring.training.accumulation import accumulate_gradients as accumulate_gradients
from jax_ring.training.buckets import Bucket as Bucket
from jax_ring.training.buckets import BucketPlan as BucketPlan
from jax_ring.training.buckets import plan_buckets as plan_buckets
from jax_ring.training.gradients import grad as grad
from jax_ring.training.gradients import reduce_in_backward as reduce_in_backward
from jax_ring.training.gradients import value_and_grad as value_and_grad
from jax_ring.training.replicas import assert_replicated as assert_replicated
from jax_ring.training.replicas import broadcast_params as broadcast_params
from jax_ring.training.same_bits.blocks import block_max as block_max
from jax_ring.training.same_bits.blocks import block_sum as block_sum
from jax_ring.training.same_bits.blocks import each_block as each_block
from jax_ring.training.same_bits.indices import block_index as block_index
from jax_ring.training.same_bits.indices import shard_index as shard_index
from jax_ring.training.sentinel import check_replicas as check_replicas
from jax_ring.training.sync import sync_gradients as sync_gradients
from jax_ring.training.sync import sync_with_feedback as sync_with_feedback
from jax_ring.training.transformation import FeedbackState as FeedbackState
from jax_ring.training.transformation import allreduce_gradients as allreduce_gradients
from jax_ring.training.transformation import feedback_specs as feedback_specs
from jax_ring.training.weighted_mean import weighted_pmean as weighted_pmean
from jax_ring.training.zero.interface import ShardedOptimizer as ShardedOptimizer
