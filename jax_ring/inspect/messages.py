"""The messages of a compiled program to which the calls as written belong: calls may have been joined."""

from collections.abc import Iterable

from jax_ring.inspect.compiled import Instruction


class Messages:
    """The messages of the all-reduces of jax_ring, which take up the calls as written, one after the other."""

    def __init__(self, instructions: Iterable[Instruction]) -> None:
        self._messages = [(i, [i.num_bytes]) for i in instructions if i.name.startswith("jax_ring_all_reduce")]

    def size_with(self, call_site: str, num_bytes: int) -> int:
        """The size of the message that has a call of `num_bytes` in this line; that of the call if none is known."""
        own = [(i.num_bytes, left) for i, left in self._messages if call_site and call_site in i.call_sites]
        for size, left in own:
            if left[0] >= num_bytes:
                left[0] -= num_bytes
                return size
        # Equal operands are sent once.
        return next((size for size, _ in own if size >= num_bytes), num_bytes)
