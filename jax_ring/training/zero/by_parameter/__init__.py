"""The layout in which ranks own parameters, or pieces of them where the optimizer is elementwise.

In reading order: `pieces.py` (who owns what), `traced_update.py` (which gradients each result of the optimizer needs),
`plan.py` (both, for parameters and state), `slicing.py` and `update.py` (what one rank computes), `layout.py`.
"""
