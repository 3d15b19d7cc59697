"""`State` and `run` in one process: what a commit keeps, what is refused, and commits on disk."""

import copy
import pickle
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_ring
from jax_ring import elastic
from jax_ring.elastic import generation, loop
from jax_ring.elastic.checkpoints import Checkpoints
from jax_ring.elastic.snapshots import Snapshot


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
    monkeypatch.setenv("JAX_RING_JOIN", "1")
    train = elastic.run(min_processes=2, num_shards=jax.local_device_count())(lambda state: None)
    with pytest.raises(ValueError, match=r"num_shards=\d+ is less than the number of devices of min_processes=2 proc"):
        train(elastic.State(step=0))


def test_a_job_has_one_call(monkeypatch):
    """A second one found the keys of the first in the coordination service, and failed in all processes."""
    monkeypatch.setattr(loop, "_is_called", False)
    monkeypatch.setenv("JAX_RING_CONTROL", "@none")
    monkeypatch.setenv("JAX_RING_LAUNCHED", "0")
    monkeypatch.setenv("JAX_RING_JOIN", "1")
    train = elastic.run()(lambda state: None)
    for _ in range(2):  # a call that the launcher refuses is none
        with pytest.raises(RuntimeError, match=r"the launcher at \S+=@none does not answer"):
            train(elastic.State(step=0))
    launcher = types.SimpleNamespace(enlist=lambda **needs: None)
    monkeypatch.setattr(loop.Control, "connect", lambda: launcher)
    monkeypatch.setattr(loop, "_loop", lambda *_: None)
    train(elastic.State(step=0))
    with pytest.raises(RuntimeError, match=r"^elastic\.run: this program has called"):
        train(elastic.State(step=0))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state))])
def test_copies(copied):
    state = elastic.State(params={"w": 1}, step=0)
    other = copied(state)
    other.step = 5
    assert (state.step, other.step, other.params) == (0, 5, {"w": 1})


@pytest.mark.parametrize("name", ["commit", "commits", "outlives_processes", "_values"])
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


def test_a_commit_is_a_copy():
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
    kept = state._snapshots[-1].trees()
    np.testing.assert_array_equal(kept["host"], [1, 1, 1])
    np.testing.assert_array_equal(kept["device"], [1, 1, 1])
    kept["host"][:] = 5
    np.testing.assert_array_equal(state._snapshots[-1].trees()["host"], [1, 1, 1])


def test_a_leaf_that_cannot_be_copied_is_named():
    state = elastic.State(step=0, data={"train": threading.Lock()})
    with pytest.raises(TypeError, match=r"State: the leaf at \['data'\]\['train'\], a lock, cannot be copied \("):
        elastic.run()(lambda state: state.commit())(state)


def test_a_generation_that_does_not_suit_is_left(monkeypatch):
    """The first, which the launcher forms before it knows what the job needs."""
    left = []

    def next_generation(state, control, after, reason, how):
        left.append(reason)
        return types.SimpleNamespace(number=1, num_processes=4)

    for name, value in {
        "_enlisted": lambda *_: "a launcher",
        "_first_generation": lambda *_: types.SimpleNamespace(number=0, num_processes=5),
        "_next_generation": next_generation,
    }.items():
        monkeypatch.setattr(loop, name, value)
    monkeypatch.setattr(jax, "device_count", lambda: 4 if left else 5)
    monkeypatch.setattr(elastic.State, "_enter", lambda *_: 0)
    train = elastic.run(num_shards=24)(lambda state: len(left))
    assert train(elastic.State(step=0)) == 1
    assert left == ["5 processes with 5 devices do not suit min_processes=1, num_shards=24"]


def test_two_commits_are_kept():
    state = elastic.State(step=0)

    @elastic.run()
    def train(state):
        for state.step in range(1, 6):
            state.commit()

    train(state)
    assert [snapshot.trees()["step"] for snapshot in state._snapshots] == [4, 5]


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
    with pytest.raises(ValueError, match=r"of another state\. The leaves that only one of them has are \[\"\['more'\]"):
        train(new_state(more=1), 5)


def test_a_commit_that_is_made_anew_replaces_the_one_on_disk(tmp_path):
    """Process 0 had written it when another was lost that had not made it."""
    for value in (1, 2):
        Checkpoints(str(tmp_path)).write(Snapshot.of({"w": np.full(3, value)}, 8, 0, 1))
    np.testing.assert_array_equal(Checkpoints(str(tmp_path)).read(8, {"w": np.zeros(3)}).leaves[0], [2, 2, 2])


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


# ---- Which exceptions mean what --------------------------------------------------------------------------------------


def from_cause(error, cause):
    try:
        try:
            raise cause
        except Exception as inner:
            raise error from inner
    except Exception as outer:
        return outer


def test_why_left():
    peer = jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: ring_psum of float32[]: Process 1 (rank 1) has ended.")
    assert generation.why_left(peer) == str(peer)
    assert generation.why_left(ValueError(str(peer))) == str(peer)  # from block_until_ready
    assert generation.why_left(from_cause(RuntimeError("step 3"), peer)) == str(peer)
    assert generation.why_left(jax.errors.JaxRuntimeError("UNKNOWN: Gloo all-reduce failed: Connection closed by peer"))
    assert generation.why_left(generation.Leave("for a new process")) == "for a new process"
    for own in (
        ValueError("bad batch"),
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"),
        RuntimeError("DEADLINE_EXCEEDED: of another library"),
        KeyboardInterrupt(),
        SystemExit(1),
    ):
        assert generation.why_left(own) is None, own


def test_an_own_error_says_what_is_dead():
    error = RuntimeError("Array has been deleted with shape=float32[3].")
    generation.explain_dead(error, 0)
    assert not hasattr(error, "__notes__")
    generation.explain_dead(error, 2)
    assert "this is generation 2 of the job" in error.__notes__[0]


def test_elastic_is_public():
    assert jax_ring.elastic.run is elastic.run
