"""`assume_hosts()`: how it enters the decision and JAX's caches, and what it refuses."""

import logging
import threading

import jax
import jax.numpy as jnp
import pytest
from compiled_programs import ONE_HOST, attribute, calls_in, collectives_of_xla
from jax.sharding import PartitionSpec as P

from jax_ring import assume_hosts, ring_psum, runtime

pytestmark = pytest.mark.one_pair  # other modules cover what XLA's passes do with calls


@pytest.fixture
def psum(mesh_of):
    """One jitted function and its argument, of eight processes."""
    mesh = mesh_of("1x8x1")
    mapped = jax.shard_map(lambda x: ring_psum(x, "i"), mesh=mesh, in_specs=P("i"), out_specs=P())
    return jax.jit(mapped), jax.ShapeDtypeStruct((64,), jnp.float32, sharding=jax.NamedSharding(mesh, P("i")))


def test_each_process_is_a_host_by_default(psum, caplog):
    caplog.set_level(logging.INFO, "jax_ring")
    function, x = psum
    assert calls_in(function.lower(x).compile().as_text()) == []
    assert "the ranks of a group are on 8 hosts, one rank on each; each process counts as a host" in caplog.text
    assert "unless jax_ring.assume_hosts() says which of them share one" in caplog.text


def test_no_lowering_is_reused_with_other_hosts(psum):
    function, x = psum
    alone = function.lower(x).as_text()
    with assume_hosts(ONE_HOST):
        together = function.lower(x).as_text()
        with assume_hosts({process: process % 2 for process in range(8)}):
            halves = function.lower(x).as_text()
        assert function.lower(x).as_text() == together
    assert function.lower(x).as_text() == alone
    assert len({alone, together, halves}) == 3
    assert attribute("group_sizes", together) == [8]
    assert attribute("group_sizes", halves) == [4, 4]
    assert attribute("members", halves) == [0, 2, 4, 6, 1, 3, 5, 7]


def test_nor_is_a_compiled_program(psum):
    """A traced function remembers what it was lowered and compiled to."""
    function, x = psum
    with assume_hosts(ONE_HOST):
        traced = function.trace(x)
        assert calls_in(traced.lower().compile().as_text()) == ["all_reduce"]
    assert calls_in(traced.lower().compile().as_text()) == []
    assert len(collectives_of_xla(function.lower(x).compile().as_text())) == 1


def test_other_threads_have_their_own(psum):
    function, x = psum
    texts = []
    with assume_hosts(ONE_HOST):
        thread = threading.Thread(target=lambda: texts.append(function.lower(x).as_text()))
        thread.start()
        thread.join()
    assert "jax_ring_all_reduce" not in texts[0]


def test_the_block_ends_with_an_error(psum):
    function, x = psum
    with pytest.raises(KeyError), assume_hosts(ONE_HOST):
        raise KeyError
    assert "jax_ring_all_reduce" not in function.lower(x).as_text()


def test_a_missing_process(psum):
    function, x = psum
    with (
        assume_hosts({process: 0 for process in range(8) if process != 5}),
        pytest.raises(ValueError, match=r"a device of process 5, and .* only the processes 0, 1, 2, 3, 4, 6, 7\. Add"),
    ):
        function.lower(x)


def test_unequal_hosts(psum, caplog):
    caplog.set_level(logging.INFO, "jax_ring")
    function, x = psum
    with assume_hosts({process: int(process == 7) for process in range(8)}):
        assert calls_in(function.lower(x).compile().as_text()) == []
    assert "with unequal numbers of ranks per host" in caplog.text
    assert "assume_hosts" not in caplog.text


def test_strict(psum, monkeypatch):
    monkeypatch.setattr(runtime, "STRICT", True)
    function, x = psum
    with pytest.raises(NotImplementedError, match=r"unless jax_ring.assume_hosts\(\) says which"):
        function.lower(x)
    with assume_hosts(ONE_HOST):
        assert "jax_ring_all_reduce" in function.lower(x).as_text()
