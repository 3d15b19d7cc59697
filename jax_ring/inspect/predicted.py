"""The bytes of calls as written: each is lowered alone, and its collectives counted."""

from collections.abc import Iterable
from functools import partial
from typing import Any

from jax.extend import core

from jax_ring import _compat
from jax_ring.inspect.compiled import Instruction, count
from jax_ring.lowering.plan import Plan, noting


class Predictor:
    """Predicts calls of a program, whose messages decide the algorithms."""

    def __init__(self, instructions: Iterable[Instruction]) -> None:
        """instructions: of the compiled program, which may have joined calls."""
        self._messages = [(i, [i.num_bytes]) for i in instructions if i.name.startswith("jax_ring_all_reduce")]
        self._lowered: dict[tuple, tuple[str, Plan | None]] = {}

    def predict(
        self, eqn: core.JaxprEqn, axis_context, platform: str
    ) -> tuple[Plan | None, list[tuple[Instruction, tuple[str, ...]]]]:
        """A call's plan, None if jax_ring does not lower it, and what it becomes, as from `count()`."""
        avals: list[Any] = [v.aval for v in eqn.invars]
        key = (eqn.primitive, *eqn.params.items(), *avals, axis_context, platform)
        if key not in self._lowered:
            plans: list[Plan] = []
            with noting(plans):
                text = _compat.lowered_alone(eqn, axis_context, platform).as_hlo_text()
            self._lowered[key] = text, plans[0] if plans else None
        text, plan = self._lowered[key]
        call_site = _compat.call_site(eqn.source_info)
        return plan, list(count(text, axis_context.mesh.size, partial(self._joined_bytes, call_site)))

    def _joined_bytes(self, call_site: str, num_bytes: int) -> int:
        """The message size of a call of `num_bytes` in this line, or else `num_bytes`."""
        own = [(i.num_bytes, left) for i, left in self._messages if call_site and call_site in i.call_sites]
        for size, left in own:
            if left[0] >= num_bytes:
                left[0] -= num_bytes
                return size
        # Equal operands are sent once.
        return next((size for size, _ in own if size >= num_bytes), num_bytes)
