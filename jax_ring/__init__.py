"""Collectives for JAX as XLA custom calls: bitwise reproducible, a drop-in for `lax.psum`."""

from jax_ring.collectives import ring_psum as ring_psum
from jax_ring.explain import Explanation as Explanation
from jax_ring.explain import explain as explain
from jax_ring.override import Override as Override
from jax_ring.override import override_lax as override_lax
from jax_ring.runtime import __version__ as __version__
