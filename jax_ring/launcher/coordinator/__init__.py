"""JAX's coordination service in a process of its own."""
