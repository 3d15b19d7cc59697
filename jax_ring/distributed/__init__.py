"""Programs of several processes: host discovery, their GPUs, and agreement checks."""
