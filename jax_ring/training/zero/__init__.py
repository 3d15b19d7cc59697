"""ZeRO: an optimizer whose state is divided among the data-parallel ranks.

`optimizer.py` has the public function. Each layout is an `interface.ShardedOptimizer`: `flat.py`, with the check that
an optimizer is elementwise (`analysis/elementwise.py`), and `by_parameter/layout.py`, which runs the traced update of
each rank's own parameters (`by_parameter/traced_update.py`). `sharded_layer.py` gathers the divided parameters of one
layer. `replicated.py` has the optimizer that is not sharded, with the same bits.
"""
