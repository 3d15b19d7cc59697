"""`State` and `run` in one process: what a commit keeps, what is refused, and commits on disk."""

import copy
import os
import pickle
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ring
from jax_ring import _compat, elastic
from jax_ring.distributed import store
from jax_ring.elastic import loop
from jax_ring.elastic.generation import Generation
from jax_ring.launcher import environment, protocol
from jax_ring.launcher.protocol import KEPT_VARIABLE
from jax_ring.launcher.watching.page import PAGE_VARIABLE, Page
from jax_ring.launcher.worker import blamed_process


@pytest.fixture(autouse=True)
def without_launcher(monkeypatch):
    monkeypatch.delenv("JAX_RING_CONTROL", raising=False)


def test_values_are_attributes():
    state = elastic.State(params={"w": 1}, step=0)
    state.step += 1
    state.params = {"w": 2}
    assert (state.step, state.params) == (1, {"w": 2})
    with pytest.raises(AttributeError, match=r"no 'stop', only params, step.*State\(stop=\.\.\., \.\.\.\)"):
        state.stop = 3
    with pytest.raises(AttributeError, match="no 'stop'; it has params, step"):
        _ = state.stop


def test_arguments_are_checked(tmp_path):
    with pytest.raises(ValueError, match="go together, got directory=None and every=3"):
        elastic.State(every=3, step=0)
    with pytest.raises(ValueError, match="every must be at least 1, got 0"):
        elastic.State(directory=str(tmp_path), every=0, step=0)
    with pytest.raises(ValueError, match="min_processes must be at least 1, got 0"):
        elastic.run(min_processes=0)
    with pytest.raises(ValueError, match="num_shards must be at least 1, got 0"):
        elastic.run(num_shards=0)
    with pytest.raises(TypeError, match=r"elastic\.run: min_processes must be an integer, got '2'"):
        elastic.run(min_processes="2")
    with pytest.raises(TypeError, match=r"elastic\.run: num_shards must be an integer, got '24'"):
        elastic.run(num_shards="24")
    with pytest.raises(TypeError, match="State: every must be an integer, got '3'"):
        elastic.State(directory=str(tmp_path), every="3", step=0)
    with pytest.raises(TypeError, match=r"elastic\.run: train must be a function, got 2\.5"):
        elastic.run()(2.5)
    with pytest.raises(TypeError, match=r"takes a jax_ring\.elastic\.State as its first argument, got dict"):
        elastic.run()(lambda state: None)({})


def test_too_few_shards_for_the_processes(monkeypatch):
    """The error is that of the script, before the launcher is asked."""
    monkeypatch.setenv("JAX_RING_CONTROL", "@none")
    monkeypatch.setattr(_compat, "is_distributed", lambda: True)
    train = elastic.run(min_processes=2, num_shards=jax.local_device_count())(lambda state: None)
    with pytest.raises(ValueError, match=r"num_shards=\d+ is less than the number of devices of min_processes=2 proc"):
        train(elastic.State(step=0))


def test_a_job_has_one_call(monkeypatch):
    """A second one would find the commits of the first."""
    monkeypatch.setattr(loop, "_is_called", False)
    monkeypatch.setenv("JAX_RING_CONTROL", "@none")
    monkeypatch.setenv("JAX_RING_LAUNCHED", "0")
    monkeypatch.setattr(_compat, "is_distributed", lambda: True)
    train = elastic.run()(lambda state: None)
    for _ in range(2):  # a call that the launcher refuses is none
        with pytest.raises(RuntimeError, match=r"the launcher at \S+=@none does not answer"):
            train(elastic.State(step=0))
    monkeypatch.setattr(protocol, "ask", lambda do, *values: None)
    train(elastic.State(step=0))
    with pytest.raises(RuntimeError, match=r"^elastic\.run: this program has called"):
        train(elastic.State(step=0))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state))])
def test_copies(copied):
    state = elastic.State(params={"w": 1}, step=0)
    other = copied(state)
    other.step = 5
    assert (state.step, other.step, other.params) == (0, 5, {"w": 1})


@pytest.mark.parametrize("name", ["commit", "commits", "_values"])
def test_names_that_a_state_has_by_itself(name):
    with pytest.raises(ValueError, match=f"State: a state has '{name}' already.*another name"):
        elastic.State(**{name: 7}, step=0)


def test_commit_needs_run():
    with pytest.raises(RuntimeError, match=r"not inside a function that jax_ring\.elastic\.run decorates"):
        elastic.State(step=0).commit()


def test_without_a_launcher_a_single_process_calls_the_function():
    key = jax.random.key(3, impl="rbg")
    state = elastic.State(params={"w": jnp.arange(3.0), "name": "a", "nothing": None}, key=key, step=0)

    @elastic.run(min_processes=1, num_shards=12)
    def train(state, factor, *, offset):
        assert isinstance(state.params["w"], np.ndarray)
        for _ in range(3):
            state.params = {**state.params, "w": factor * jnp.asarray(state.params["w"]) + offset}
            state.step += 1
            state.commit()
        return state.step

    assert train(state, 2.0, offset=1.0) == 3
    with pytest.raises(RuntimeError, match="not inside a function"):
        state.commit()
    np.testing.assert_array_equal(state.params["w"], [7, 15, 23])
    assert state.params["name"] == "a"
    assert state.params["nothing"] is None
    assert jax.random.key_impl(state.key) == jax.random.key_impl(key)
    np.testing.assert_array_equal(jax.random.key_data(state.key), jax.random.key_data(key))
    assert state.commits == 3
    assert repr(state) == "State(params, key, step; 3 commits)"


def test_a_commit_needs_the_values_only_until_it_returns(monkeypatch):
    files = environment.kept_files(1)
    monkeypatch.setenv(KEPT_VARIABLE, ",".join(map(str, (0, *files))))
    host, device = np.ones(3), jnp.ones(3)
    state = elastic.State(host=host, device=device)

    @elastic.run()
    def train(state):
        state.host, state.device = host, device
        state.commit()
        host[:] = 2
        jax.jit(lambda x: x + 1, donate_argnums=0)(device)  # reuses the memory
        assert device.is_deleted()

    train(state)

    @elastic.run()
    def go_on(state):
        assert state.commits == 1
        np.testing.assert_array_equal(state.host, [1, 1, 1])
        np.testing.assert_array_equal(state.device, [1, 1, 1])

    go_on(elastic.State(host=0, device=0))
    for file in files:
        os.close(file)


def test_a_leaf_that_cannot_be_kept_is_named_without_a_launcher_too():
    state = elastic.State(step=0, data={"train": threading.Lock()})
    with pytest.raises(
        TypeError, match=r"State: the leaf at \['data'\]\['train'\], a lock, cannot be kept: leaves are"
    ):
        elastic.run()(lambda state: state.commit())(state)


def test_hosts_and_commits_of_another_job_do_not_count(monkeypatch):
    """A program that a process of a job starts inherits the variables."""
    monkeypatch.setenv("JAX_RING_HOSTS", "0,4")
    monkeypatch.setenv("JAX_RING_COMMIT", "7")
    generation = Generation()
    assert (generation.hosts.has_several_hosts, generation.newest_commit) == (False, 0)


@pytest.mark.parametrize(("needs", "count"), [({"num_shards": 24}, 5), ({"min_processes": 3}, 2)])
def test_a_generation_that_does_not_suit_is_left(monkeypatch, needs, count):
    """The first, which the launcher forms before it knows what the job needs."""
    monkeypatch.setattr(loop, "_is_called", False)
    monkeypatch.setattr(_compat, "is_distributed", lambda: True)
    monkeypatch.setattr(_compat, "num_distributed_processes", lambda: count)
    monkeypatch.setattr(jax, "local_device_count", lambda: 1)
    monkeypatch.setenv("JAX_RING_CONTROL", "@none")
    asked = requests(monkeypatch)
    with pytest.raises(Killed):
        elastic.run(**needs)(lambda state: pytest.fail("it is called"))(elastic.State(step=0))
    needs = {"min_processes": 1, "num_shards": None, **needs}
    reason = (
        f"{count} processes with {count} devices do not suit "
        f"min_processes={needs['min_processes']}, num_shards={needs['num_shards']}"
    )
    assert asked[1:] == [("leave", reason)]


def test_members_leave_after_a_commit(monkeypatch):
    """The launcher ends a process that has left: nothing of the script runs any more."""
    monkeypatch.setattr(loop, "_is_called", False)
    monkeypatch.setattr(_compat, "is_distributed", lambda: True)
    monkeypatch.setattr(_compat, "num_distributed_processes", lambda: 1)
    monkeypatch.setenv("JAX_RING_CONTROL", "@none")
    state = elastic.State(step=0)

    @elastic.run()
    def train(state):
        for state.step in range(1, 100):
            try:
                state.commit()
            except Exception:
                pytest.fail("train catches it")

    page = Page.new()
    page.words.change_pending = True
    monkeypatch.setenv(PAGE_VARIABLE, str(page.file))
    asked = requests(monkeypatch)
    with pytest.raises(Killed):
        train(state)
    assert asked[1:] == [("leave", "the members change after a commit")]
    assert (state.commits, state.step) == (1, 1)
    page.close()


class Killed(BaseException):
    """In place of the end of this process."""


def requests(monkeypatch):
    """What a launcher is asked, that kills this process when it has left."""
    asked = []
    monkeypatch.setattr(protocol, "ask", lambda *asks: asked.append(asks))

    def sleep(seconds):
        raise Killed

    monkeypatch.setattr(protocol, "time", types.SimpleNamespace(sleep=sleep))
    return asked


def test_other_exceptions_propagate():
    def train(state):
        state.commit()
        raise ValueError("bad batch")

    state = elastic.State(step=0)
    with pytest.raises(ValueError, match="bad batch"):
        elastic.run()(train)(state)
    with pytest.raises(RuntimeError, match="not inside a function"):
        state.commit()


def test_checkpoints(tmp_path):
    def new_state(**more):
        params = {"w": jnp.zeros(2, jnp.bfloat16), "b": np.zeros((), np.int32)}
        others = {"key": jax.random.key(0), "scale": jnp.asarray(1.0), "step": 0, **more}
        return elastic.State(directory=str(tmp_path), every=2, params=params, **others)

    @elastic.run()
    def train(state, steps):
        began = state.step
        while state.step < steps:
            state.step += 1
            state.key = jax.random.fold_in(state.key, state.step)
            assert (state.params["w"] * state.scale).dtype == jnp.bfloat16  # the scale is of a weak type
            state.scale = 2.0 * state.scale
            state.params = {"w": jnp.full(2, state.step / 2, jnp.bfloat16), "b": np.int32(state.step)}
            state.commit()
        return began

    first = new_state()
    assert train(first, 5) == 0
    state = new_state()
    assert train(state, 5) == 4  # the last that was written
    assert state.params["w"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(state.params["w"], np.float32), [2.5, 2.5])
    np.testing.assert_array_equal(jax.random.key_data(state.key), jax.random.key_data(first.key))
    assert (state.scale, state.scale.weak_type) == (32, True)
    with pytest.raises(RuntimeError, match=r"other leaves than the checkpoint 4 in .* has are \['more'\]\. All"):
        train(new_state(more=1), 5)


def test_checkpoints_without_elements(tmp_path):
    """Of arrays without elements, and of a state without arrays, for which orbax has nothing to write."""

    @elastic.run()
    def train(state):
        state.commit()
        return state.empty

    def empty_after_two(name, empty, **more):
        options = {"directory": str(tmp_path / name), "every": 1, "empty": empty, **more}
        train(elastic.State(**options))
        return train(elastic.State(**options))

    empty = {"half": jnp.zeros((0, 4), jnp.bfloat16), "keys": jax.random.split(jax.random.key(0, impl="rbg"), (2, 0))}
    for name, more in (("some", {"w": np.ones(3)}), ("none", {})):
        found = empty_after_two(name, empty, **more)
        assert (found["half"].shape, found["half"].dtype) == ((0, 4), jnp.bfloat16)
        assert (found["keys"].shape, found["keys"].dtype) == ((2, 0), empty["keys"].dtype)
    assert empty_after_two("values", {"name": "a", "step": 0}) == {"name": "a", "step": 0}


def test_a_process_that_does_not_come_is_named(monkeypatch):
    def get(key):
        if key.endswith("/1"):
            raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: GetKeyValue() timed out with key: {key}")
        return b"[[0]]"

    monkeypatch.setattr(_compat, "num_distributed_processes", lambda: 2)
    of_job = types.SimpleNamespace(put=lambda key, value: None, get=get)
    monkeypatch.setattr(store, "current", lambda: of_job)
    with pytest.raises(RuntimeError, match="process 1 has not begun its function within 60 s; process 0 has") as failed:
        elastic.State(step=0)._enter(Generation())
    assert blamed_process(failed.value) == -1


def test_elastic_is_public():
    assert jax_ring.elastic.run is elastic.run
