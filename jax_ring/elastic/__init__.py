"""Training that goes on when processes are lost or added, without starting the others again."""

from jax_ring.elastic.loop import run
from jax_ring.elastic.state import State

__all__ = ["State", "run"]
