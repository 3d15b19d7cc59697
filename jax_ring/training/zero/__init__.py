"""ZeRO: an optimizer whose state is divided among the data-parallel ranks.

`optimizer.py` has the public functions. Each layout is an `interface.ShardedOptimizer`: `flat.py`, which makes vectors
of the parameters and checks that the optimizer is elementwise (`elementwise.py`, by `data_flow.py`), and
`by_parameter/layout.py`. Both send by `reduction.py`. `sharded_layer.py` gathers the divided parameters of one layer.
"""
