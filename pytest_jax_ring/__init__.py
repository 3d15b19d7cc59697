"""A pytest plugin for programs of several JAX processes, with faults on purpose. See docs/testing.md.

pytest loads it before any conftest.py, so it imports neither JAX nor `jax_ring` until a test needs them. It is a
package of its own because importing `jax_ring` imports JAX.
"""

from pytest_jax_ring.faults import Fault, delay, fault_point, kill, stop

__all__ = ["Fault", "delay", "fault_point", "kill", "stop"]
