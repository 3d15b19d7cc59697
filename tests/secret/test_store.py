"""Strangers in JAX's key-value store: what they write there is refused, whatever they have read before."""

import pathlib
import re
import time

import jax
import numpy as np
import pytest
import watched
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from job import client
from launches import run
from watched import Processes, as_text

import jax_ring
from jax_ring.distributed.store import ForeignValueError, Store
from jax_ring.launcher import protocol

SECRET = "a secret of the job"
REFUSED = "in JAX's coordination service, which begins with b"


def answer_for_process_1():
    """Passes on whatever process 0 says, as if process 1 had said it. It needs no key of the job for that."""
    while not client().key_value_dir_get("test/"):
        for key, value in client().key_value_dir_get_bytes("jax_ring/replicas/"):
            if key.endswith("/0"):
                client().key_value_set_bytes(f"{key[:-1]}1", value, True)
        time.sleep(0.01)


def compare_copies():
    """Process 0 has a copy of its own. In the place of process 1 there is a stranger, who says that it is the same."""
    jax.distributed.initialize(**watched.distributed)
    devices = jax.devices()
    if jax.process_index() == 1:
        answer_for_process_1()
        return
    from jax_ring import assert_replicated

    copy = jax.device_put(np.arange(3.0), devices[0])
    sharding = NamedSharding(Mesh(np.array(devices), "i"), P())
    try:
        with pytest.raises(RuntimeError, match=rf"^the value of jax_ring/replicas/0,1/0/1 {REFUSED}"):
            assert_replicated(jax.make_array_from_single_device_arrays((3,), sharding, [copy]))
    finally:
        client().key_value_set("test/end", "")


@pytest.mark.usefixtures("secret")
def test_nobody_answers_for_a_process_that_its_copy_is_the_same():
    with Processes(compare_copies, 2, distributed=None) as program:
        results = program.wait()
    assert [result.returncode for result in results] == [0, 0], as_text(results)


# A stranger replaces what process 0 sends, before process 1 reads it. It has a connection of its own.
STRANGER = """
import os, sys
from jaxlib import _jax
client = _jax.get_distributed_runtime_client(sys.argv[1], 1, init_timeout=60, shutdown_on_destruction=False)
client.connect()
for key, value in client.key_value_dir_get_bytes("jax_ring/elastic/"):
    client.key_value_set_bytes(key, value.replace(b"123", b"456"), True)
os._exit(0)
"""
BEGINS_WITH_A_REPLACED_VALUE = f"""
import os
import subprocess
import sys

import jax
import jax_ring
from jax_ring.elastic.generation import Generation

jax.distributed.initialize()
get = Generation.get

def get_replaced(generation, name, process):
    if generation.process == 1 and name == "header":
        get(generation, name, process)
        address, own = os.environ["JAX_COORDINATOR_ADDRESS"], ("JAX_RING", "JAX_COORDINATOR")
        foreign = {{name: value for name, value in os.environ.items() if not name.startswith(own)}}
        subprocess.run([sys.executable, "-c", {STRANGER!r}, address], env=foreign, check=True)
    return get(generation, name, process)

Generation.get = get_replaced

@jax_ring.elastic.run(min_processes=2)
def train(state):
    print("begins at", state.step, flush=True)
    state.commit()

train(jax_ring.elastic.State(step=123))
"""


def test_nobody_replaces_what_a_process_begins_with(script):
    status, out, err = run("-n", "2", script(BEGINS_WITH_A_REPLACED_VALUE))
    assert status == 1, (out, err)
    assert "[1] begins" not in "".join(out)
    assert re.search(f"ForeignValueError: the value of jax_ring/elastic/header/0 {REFUSED}", err), err


# ---- Values ----------------------------------------------------------------------------------------------------------


class Client:
    """A fake of JAX's client, with all that is in the store."""

    def __init__(self, **values):
        self.values = values

    def key_value_set_bytes(self, key, value, allow_overwrite=False):
        if key in self.values and not allow_overwrite:
            raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: {key}")
        self.values[key] = value

    def key_value_try_get_bytes(self, key):
        if key not in self.values:
            raise jax.errors.JaxRuntimeError(f"NOT_FOUND: {key}")
        return self.values[key]

    def blocking_key_value_get_bytes(self, key, timeout_ms):
        return self.key_value_try_get_bytes(key)


@pytest.fixture
def client_of_job(monkeypatch):
    monkeypatch.setenv(protocol.SECRET_VARIABLE, SECRET)
    return Client()


def assert_refused(store, key, why):
    with pytest.raises(ForeignValueError, match=rf"^the value of {key} {REFUSED}.* has no code of this job: {why}"):
        store.get(key)
    assert store.peek(key) is None


OTHER_SECRET = "who wrote it has another secret, or none"


@pytest.mark.parametrize("value", [b"", b"a value", bytes(range(256)), b"x" * 100_000])
def test_processes_of_a_job_believe_each_other(client_of_job, value):
    Store(client_of_job).put("a/0", value)
    other = Store(client_of_job)
    assert other.get("a/0") == other.peek("a/0") == value
    Store(client_of_job).put("a/0", b"later", replaces=True)
    assert other.get("a/0") == b"later"


def test_what_a_stranger_makes_of_a_value(client_of_job):
    """Every change of a bit, and every place to cut it off."""
    store = Store(client_of_job)
    store.put("a/0", b"value")
    found = client_of_job.values["a/0"]
    changed = [
        bytes(each ^ ((i == at) << bit) for i, each in enumerate(found)) for at in (0, 31, 32, 36) for bit in (0, 7)
    ]
    for each in (*changed, *(found[:end] for end in range(len(found))), found + b"x", b"value", bytes(37), b""):
        client_of_job.values["a/0"] = each
        assert_refused(store, "a/0", OTHER_SECRET)


def test_a_value_of_another_key_of_a_process_or_a_call(client_of_job):
    store = Store(client_of_job)
    for key in ("a/0", "a/0/1"):
        store.put(key, b"value")
        for other in ("a/1", "a/0/2", "/a/0", "a/01"):
            client_of_job.values[other] = client_of_job.values[key]
            assert_refused(store, other, OTHER_SECRET)


def test_a_value_of_another_generation_or_runtime(client_of_job, monkeypatch):
    """The same key has been used there, and by the same secret."""
    for variable, tokens in (("one", ["", ""]), ("", ["one", "other"])):
        monkeypatch.setenv(protocol.MEMORY_VARIABLE, variable)
        earlier = Client(**{"jax_ring/token": tokens[0].encode()})
        Store(earlier).put("a/0", b"value")
        monkeypatch.setenv(protocol.MEMORY_VARIABLE, variable and "other")
        later = Client(**{"jax_ring/token": tokens[1].encode(), "a/0": earlier.values["a/0"]})
        assert_refused(Store(later), "a/0", OTHER_SECRET)


def test_who_has_no_secret_is_named(client_of_job, monkeypatch):
    job = Store(client_of_job)
    monkeypatch.delenv(protocol.SECRET_VARIABLE)
    without = Store(client_of_job)
    without.put("a/0", b"value")
    job.put("a/1", b"value")
    assert Store(client_of_job).get("a/0") == b"value"
    assert_refused(job, "a/0", "the process that wrote it has no secret, and this one has. .* JAX_RING_SECRET")
    assert_refused(without, "a/1", "this process has no secret, and who wrote it may have one")


def test_what_a_stranger_writes_is_shown_without_harm(client_of_job):
    client_of_job.values["a/0"] = "\x1b[2J\n\u202e".encode() * 20
    with pytest.raises(ForeignValueError) as raised:
        Store(client_of_job).get("a/0")
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 800


def test_a_key_that_a_stranger_has_written_first(client_of_job):
    client_of_job.values["a/0"] = b"foreign"
    with pytest.raises(ForeignValueError, match=r"^a/0 has a value .* before this process .* JAX's mutual TLS\.$"):
        Store(client_of_job).put("a/0", b"value")


def test_a_token_of_a_stranger(client_of_job):
    """Whoever is first sets it; all processes take it, and nobody learns the key."""
    client_of_job.values["jax_ring/token"] = b"\xff\x00" * 100
    first, second = Store(client_of_job), Store(client_of_job)
    first.put("a/0", b"value")
    assert second.get("a/0") == b"value"
    assert first.memory == second.memory


def test_every_value_goes_through_the_store():
    """A module that asks JAX's client itself would believe anybody."""
    package = pathlib.Path(jax_ring.__file__).parent
    found = re.compile("key_value_|put_bytes|get_bytes|publish_once")
    asks = {str(each.relative_to(package)) for each in package.rglob("*.py") if found.search(each.read_text())}
    assert asks == {"_compat.py", "distributed/store.py"}
