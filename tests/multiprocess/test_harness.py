"""The multi-process harness: it starts processes, collects their output, and leaves none running."""

import os
import re
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from watched import Processes, as_text

pytestmark = pytest.mark.one_pair  # native code and Python's


def total(scale):
    mesh = Mesh(np.array(jax.devices()), ("i",))
    x = jax.make_array_from_callback((4,), jax.NamedSharding(mesh, P("i")), lambda index: np.arange(4.0)[index] * scale)
    out = jax.jit(jax.shard_map(lambda x: lax.psum(x, "i"), mesh=mesh, in_specs=P("i"), out_specs=P()))(x)
    print(f"{jax.process_index()} {jnp.squeeze(out.addressable_data(0))} {os.environ['NAME']}")


def test_every_process_runs_the_body():
    with Processes(total, 2, 2, arguments=[10], environment={"NAME": "a"}) as program:
        results = program.wait()
    assert [result.returncode for result in results] == [0, 0], as_text(results)
    # XLA uses Gloo between processes, which also writes to stdout.
    for line, result in zip(["0 60.0 a", "1 60.0 a"], results, strict=True):
        assert line in result.stdout.splitlines()


def test_exceptions_are_reported_and_stopped_processes_are_killed():
    source = "import watched, time\nprint('ready', flush=True)\nif watched.distributed['process_id'] == 0: 1 / 0\n"
    with Processes(source + "time.sleep(1000)", 2, distributed=None) as program:
        program.wait_until(1, "ready")
        program.popen[1].send_signal(signal.SIGSTOP)
        program.popen[0].wait(20)
        failed, stopped = program.wait(timeout=0)
        assert failed.returncode == 1
        assert "ZeroDivisionError" in failed.stderr
        assert stopped.returncode is None
        with pytest.raises(AssertionError, match=r"process 0 has not written 'more'\n\[0\] returned 1"):
            program.wait_until(0, "more")
    assert program.popen[1].returncode == -signal.SIGKILL
    text = r"\[0\] returned 1\n.*\[0\] ready(.|\n)*\[0\] ZeroDivisionError(.|\n)*\[1\] is still running"
    assert re.search(text, as_text([failed, stopped]))
