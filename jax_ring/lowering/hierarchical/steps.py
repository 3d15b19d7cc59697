"""Steps of a call on two levels: functions of values, jax_ring's collectives, and XLA's between hosts."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo as hlo
from jax.interpreters import mlir

from jax_ring.lowering.call_spec import CallSpec
from jax_ring.lowering.custom_call import emitter
from jax_ring.lowering.hierarchical import wait_markers
from jax_ring.lowering.kinds import Kind
from jax_ring.lowering.xla import ops


class Values(NamedTuple):
    values: Sequence
    dtype: np.dtype

    @property
    def avals(self) -> list:
        return [jax.core.ShapedArray(ir.RankedTensorType(x.type).shape, self.dtype) for x in self.values]


class Steps(NamedTuple):
    """A call across hosts, in lowering."""

    ctx: mlir.LoweringRuleContext
    call: CallSpec

    def run(self, fun: Callable, values: Values, dtype) -> Values:
        """Emits `fun(position, *values)`, without collectives, which returns values of `dtype`.

        position: the rank's mesh position.
        """
        avals = [jax.core.ShapedArray((), np.uint32), *values.avals]
        return Values(ops.inline(self.ctx, fun, [hlo.partition_id(), *values.values], avals), np.dtype(dtype))

    def each(self, fun: Callable, values: Values, dtype) -> Values:
        return self.run(lambda _, *xs: map(fun, xs), values, dtype)

    def intra(self, kind: Kind, values: Values, avals_out: Sequence, **changes: Any) -> Values:
        """Emits jax_ring's collective between each host's ranks."""
        ctx = self.ctx.replace(avals_in=values.avals, avals_out=avals_out)
        return Values(emitter.emit(ctx, values.values, self.call.within_hosts(kind, **changes)), values.dtype)

    def inter(
        self, emit: Callable, values: Values, *, added: tuple[int, ...] = (), after: Sequence[Values] = ()
    ) -> tuple[Values, list[Values]]:
        """Emits one collective of XLA between hosts for all values, concatenated.

        Args:
          emit: (value) to the collective's result; indices of the last dimension are alike to it.
          values: of one shape but for the last dimension.
          added: leading dimensions that it adds.
          after: values to wait for, so that all ranks begin in one order.

        Returns:
          The results, and these values.
        """
        sizes = [aval.shape[-1] for aval in values.avals]
        joined = values
        if len(sizes) > 1:
            joined = self.run(lambda _, *xs: [jnp.concatenate(xs, axis=-1)], values, values.dtype)
        (aval,) = joined.avals
        waited = [x for each in after for x in each.values]
        waited_avals = [aval for each in after for aval in each.avals]
        results = wait_markers.enclose(
            self.ctx, [*joined.values, *waited], lambda all_values: [emit(all_values[0]), *all_values[1:]],
            call=self.call.description, groups=self.call.levels.inter, avals_in=[aval, *waited_avals],
            avals_out=[jax.core.ShapedArray((*added, *aval.shape), aval.dtype), *waited_avals],
        )  # fmt: skip
        crossed = Values(results[:1], values.dtype)
        if len(sizes) > 1:
            ends = np.cumsum(sizes)[:-1]
            crossed = self.run(lambda _, x: jnp.split(x, ends, axis=-1), crossed, values.dtype)
        rest = iter(results[1:])
        return crossed, [Values([next(rest) for _ in each.values], each.dtype) for each in after]
