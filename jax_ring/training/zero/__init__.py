"""ZeRO: an optimizer whose state is divided among the data-parallel ranks.

`sharded_optimizer.py` has the public function. Each layout is an `interface.ShardedOptimizer`: `flat_layout.py`, with
the check that an optimizer is elementwise (`elementwise.py`), and `parameter_layout.py`, which runs the traced update
of each rank's own parameters (`traced_update.py`).
"""
