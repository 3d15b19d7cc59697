"""What the benchmarks of training steps train."""
