"""Steps of a call on two levels: functions of values, jax_ring's collectives, and XLA's between hosts."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.mlir.dialects import stablehlo as hlo

from jax_ring import _compat
from jax_ring.lowering.call import CallSpec, Kind
from jax_ring.lowering.custom_call import engine
from jax_ring.lowering.hierarchical import wait_markers
from jax_ring.lowering.xla import ops


class Steps(NamedTuple):
    """A call across hosts, in lowering."""

    ctx: _compat.LoweringContext
    call: CallSpec

    def run(self, fun: Callable, values: Sequence) -> list:
        """Emits `fun(position, *values)`, without collectives. position: the rank's mesh position."""
        return ops.inline(self.ctx, fun, [hlo.partition_id(), *values])

    def each(self, fun: Callable, values: Sequence) -> list:
        return self.run(lambda _, *xs: map(fun, xs), values)

    def intra(self, kind: Kind, values: Sequence, avals_out: Sequence | None = None, **changes: Any) -> list:
        """Emits jax_ring's collective between each host's ranks. avals_out: by default the operands'."""
        avals_in = list(map(ops.aval_of_value, values))
        ctx = self.ctx.replace(avals_in=avals_in, avals_out=avals_out or avals_in)
        return list(engine.emit(ctx, values, self.call.within_hosts(kind, **changes)))

    def inter(self, emit: Callable, values: Sequence, after: Sequence = ()) -> list:
        """Emits one collective of XLA between hosts for all values, concatenated.

        Args:
          emit: (value) to the collective's result; indices of the last dimension are alike to it.
          values: of one shape but for the last dimension.
          after: values to wait for, so that all ranks begin in one order.

        Returns:
          The results, and `after`.
        """
        ends = np.cumsum([ops.aval_of_value(x).shape[-1] for x in values])[:-1]
        joined = self.run(lambda _, *xs: [jnp.concatenate(xs, axis=-1)], values) if ends.size else values
        crossed, *after = wait_markers.enclose(
            self.ctx, [*joined, *after], lambda all_values: [emit(all_values[0]), *all_values[1:]],
            call=self.call.description, groups=self.call.levels.inter,
        )  # fmt: skip
        results = self.run(lambda _, x: jnp.split(x, ends, axis=-1), [crossed]) if ends.size else [crossed]
        return [*results, *after]
