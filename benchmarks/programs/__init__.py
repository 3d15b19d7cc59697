"""Programs of others, unmodified, by XLA's collectives and by jax_ring's."""
