"""The bytes of calls as written: each is lowered alone, and its collectives counted."""

from collections.abc import Iterable
from functools import partial
from typing import Any

from jax.extend import core

from jax_ring import _compat
from jax_ring.inspect.compiled import Instruction, count


class Predictor:
    """Predicts calls of a program, whose messages decide the algorithms."""

    def __init__(self, instructions: Iterable[Instruction]) -> None:
        """instructions: of the compiled program, which may have joined calls."""
        self._messages = [(i, [i.num_bytes]) for i in instructions if i.name.startswith("jax_ring_all_reduce")]
        self._lowered: dict[tuple, str] = {}

    def predict(self, eqn: core.JaxprEqn, axis_context, platform: str) -> list[tuple[Instruction, tuple[str, ...]]]:
        """What a call becomes, as from `count()`."""
        avals: list[Any] = [v.aval for v in eqn.invars]
        key = (eqn.primitive, *eqn.params.items(), *avals, axis_context, platform)
        if key not in self._lowered:
            self._lowered[key] = _compat.lowered_alone(eqn, axis_context, platform).as_hlo_text()
        call_site = _compat.call_site(eqn.source_info)
        return list(count(self._lowered[key], axis_context.mesh.size, partial(self._joined_bytes, call_site)))

    def _joined_bytes(self, call_site: str, num_bytes: int) -> int:
        """The message size of a call of `num_bytes` in this line, or else `num_bytes`."""
        own = [(i.num_bytes, left) for i, left in self._messages if call_site and call_site in i.call_sites]
        for size, left in own:
            if left[0] >= num_bytes:
                left[0] -= num_bytes
                return size
        # Equal operands are sent once.
        return next((size for size, _ in own if size >= num_bytes), num_bytes)
