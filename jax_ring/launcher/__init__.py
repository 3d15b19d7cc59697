"""The parts of `jax_ring.launch`. None of them imports JAX."""
