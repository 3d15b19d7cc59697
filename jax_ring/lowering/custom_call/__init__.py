"""Custom calls to an engine: operands, attributes, streams, and those that XLA's partitioner divides."""
