"""An optimizer as two traced functions, for abstract parameters."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr

from jax_ring import _compat
from jax_ring.options import path_texts
from jax_ring.training.zero.given_norms import as_equation, norm_given_by


class Traced(NamedTuple):
    """An optax transformation for certain parameters; the types of its state, and the paths to them."""

    init: ClosedJaxpr
    update: ClosedJaxpr
    state: list
    paths: list[str]

    @classmethod
    def of(cls, tx: Any, params: Any, axis_sizes: dict[Any, int]) -> Traced:
        """Traces where these axes are bound, without a mesh. UnexpectedTracerError if it holds a tracer."""
        env = list(axis_sizes.items())
        with (
            _compat.without_vma(),
            jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())),
            # Lift the program's settings here. If they forbid an operation of the optimizer, its own update raises the
            # error.
            jax.numpy_rank_promotion("allow"),
            jax.numpy_dtype_promotion("standard"),
            jax.transfer_guard("allow"),
            norm_given_by(as_equation),
        ):
            init, state = jax.make_jaxpr(tx.init, axis_env=env, return_shape=True)(params)
            update, results = jax.make_jaxpr(tx.update, axis_env=env, return_shape=True)(params, state, params)
        found, expected = (str(jax.tree.structure(tree)) for tree in (results, (params, state)))
        if found != expected:
            raise ValueError(f"update returned a tree {found} instead of {expected}")
        if any(isinstance(x, jax.core.Tracer) for x in (*init.consts, *update.consts)):
            raise jax.errors.UnexpectedTracerError("closure")
        return cls(init, update, jax.tree.leaves(state), path_texts(state))

    def split(self, results: list) -> tuple[list, list]:
        """What stands for updates and for the state in results of `update`."""
        return results[: len(self.init.in_avals)], results[len(self.init.in_avals) :]
