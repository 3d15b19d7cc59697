"""All-reduces between processes of this host, by other libraries and by JAX, which are measured beside each other."""
