"""Processes that are all stopped for longer than the deadline go on: it does not count the time that none could run."""

import pathlib
import signal
import time

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from watched import Processes, as_text

pytestmark = [pytest.mark.full, pytest.mark.one_pair]  # native code; takes as long as the pauses

DEADLINE = 2.0
PAUSE = 1.3 * DEADLINE
PAUSES = 2


def add_until(end):
    """Loops of sums, one after the other, until the file is there."""
    from jax_ring import _ffi_cpu, ring_psum

    ranks = jax.device_count()
    mesh = Mesh(jax.devices(), ("i",))

    def loop(x, ends):
        return lax.fori_loop(0, 500, lambda _, x: ring_psum(x, "i") / ranks, x), ring_psum(ends, "i")

    def on_all(value):
        value = np.full(1, value, np.float32)
        return jax.make_array_from_callback((ranks,), jax.NamedSharding(mesh, P("i")), lambda index: value)

    f = jax.jit(jax.shard_map(loop, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False))
    x, ends = jax.block_until_ready(f(on_all(1), on_all(0)))
    _ffi_cpu.set_deadline(DEADLINE)  # now that all have compiled, which takes them different times
    while not ends.addressable_data(0)[0]:
        x, ends = f(x, on_all(pathlib.Path(end).exists()))
        print("turn", flush=True)
    assert x.addressable_data(0)[0] == 1


@pytest.mark.parametrize(("processes", "devices_each"), [(1, 8), (2, 1), (2, 4)])
def test_goes_on(tmp_path, processes, devices_each):
    distributed = {} if processes > 1 else None
    end = tmp_path / "end"
    with Processes(add_until, processes, devices_each, arguments=[str(end)], distributed=distributed) as program:
        for process in range(processes):
            program.wait_until(process, "turn")
        for _ in range(PAUSES):
            time.sleep(DEADLINE / 4)
            for number in (signal.SIGSTOP, signal.SIGCONT):
                for process in program.popen:
                    process.send_signal(number)
                if number == signal.SIGSTOP:
                    time.sleep(PAUSE)
        time.sleep(DEADLINE / 4)
        end.touch()
        results = program.wait()
    assert [result.returncode for result in results] == [0] * processes, as_text(results)
