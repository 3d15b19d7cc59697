"""What importing jax_ring changes in JAX, each with its reason.

The package's primitives register their own rules; `override_lax()` replaces JAX's while it is on, and reads the
programs that XLA compiles. A process of several adds hooks for its end (`distributed/exit_notice.py`) and for errors of
XLA's collectives (`distributed/xla_timeouts.py`).
"""

import os

from jax_ring import _compat, _ffi_cpu, runtime
from jax_ring.distributed import discovery, xla_timeouts
from jax_ring.lowering import override
from jax_ring.lowering.custom_call import partitioned
from jax_ring.lowering.passes import pipeline


def install() -> None:
    # XLA finds the engines by the names of their calls.
    runtime.register()
    # Error messages and the metadata of compiled programs name the user's line, not one of this package.
    _compat.leave_out_of_call_sites()
    # The calls in a shard_map are joined and named once its body is lowered.
    _compat.replace_lowering(_compat.shard_map_p, ("cpu",), pipeline.rule, cacheable=True)
    # XLA's partitioner divides arrays and then asks for the call on one device's part.
    _compat.register_partitioner(partitioned.TARGET, partitioned.partition)
    # Equal calls are numbered in each build, and a process may build a lowered program more than once.
    _compat.call_around_builds(_ffi_cpu.count_builds)
    # Passes that need the whole lowered program.
    _compat.call_with_programs(pipeline.end_program)
    if runtime.OVERRIDE:
        override.enable_in_all_threads()
    # XLA's collectives between processes wait for 30 minutes. XLA reads their limit when the backend starts.
    _compat.call_when_distributed(xla_timeouts.begin)
    # A forked child lacks JAX's threads.
    os.register_at_fork(after_in_child=runtime.note_fork)
    # Other processes wait for the host and the GPUs of this one. Read its GPUs no earlier than JAX does.
    _compat.call_when_distributed(discovery.publish)
    _compat.call_with_plugins(discovery.publish_with_plugins)
