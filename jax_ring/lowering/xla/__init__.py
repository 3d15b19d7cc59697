"""Where XLA serves a call: its collectives, and what the lowerings need of StableHLO."""
