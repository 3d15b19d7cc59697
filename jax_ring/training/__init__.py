"""Data-parallel training: gradients that are reduced in buckets, sharded optimizers, and copies that must not drift."""
