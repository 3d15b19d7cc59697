"""What a program communicates: as written, as compiled, and in bytes on the wire."""

from jax_ring.inspect.compiled import Instruction as Instruction
from jax_ring.inspect.explanation import Collective as Collective
from jax_ring.inspect.explanation import Explanation as Explanation
from jax_ring.inspect.explanation import explain as explain
