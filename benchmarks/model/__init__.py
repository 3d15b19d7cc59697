"""What an all-reduce costs: formulas, a simulator of topologies, fits to measurements, and pictures of schedules."""
