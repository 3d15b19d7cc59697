"""The collectives that XLA's partitioner inserts into ordinary `jit` programs, replaced in the program's HLO."""
