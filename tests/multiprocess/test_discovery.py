"""What processes publish about their hosts. A fake key-value store stands in for the other processes."""

import json
import socket

import jax
import pytest

from jax_ring import _compat, runtime
from jax_ring.distributed import discovery, store
from jax_ring.distributed.discovery import Gpus, Identity
from jax_ring.distributed.store import ForeignValueError, Store
from jax_ring.launcher import protocol
from jax_ring.launcher.schema import read


def value(client, key):
    """What a process of the job reads."""
    return Store(client).get(key)


class Client:
    """A fake client of the key-value store, with values that other processes have published."""

    def __init__(self, published=(), token=b"a token"):
        self.values, self.waits = {}, []
        if token:
            self.values["jax_ring/token"] = token
        for key, value in dict(published).items():
            Store(self).put(key, value)

    def key_value_set_bytes(self, key, value, allow_overwrite):
        if key in self.values:
            raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: {key}")
        self.values[key] = value

    def key_value_try_get_bytes(self, key):
        return self.values[key]

    def blocking_key_value_get_bytes(self, key, timeout_ms):
        self.waits.append(timeout_ms)
        if key not in self.values:
            raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: {key} after {timeout_ms} ms")
        return self.values[key]


@pytest.fixture
def runtime_of(monkeypatch):
    """Makes this process 0 of two, with the given client. Returns what the engines are told: (process, label, key)."""
    joined = []
    monkeypatch.setattr(discovery, "_has_plugins", False)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(runtime, "join_processes", lambda *told: joined.append(told[:3]))

    def become(client):
        monkeypatch.setattr(
            _compat._distributed, "global_state", type("State", (), {"client": client, "process_id": 0})
        )
        return joined

    return become


def names(key, token):
    """What the names of a job's shared memory are made of."""
    return protocol.memory_label(key, token), protocol.memory_key(key, token)


@pytest.mark.parametrize("own", [None, "here"])
def test_hosts_are_distinguished(runtime_of, monkeypatch, own):
    if own is not None:
        monkeypatch.setenv("JAX_RING_HOST_ID", own)
    client = Client({"jax_ring/host/1": json.dumps(["there", "", "node1"]).encode()})
    joined = runtime_of(client)
    discovery.publish()
    assert discovery.host_of(0) == json.loads(value(client, "jax_ring/host/0"))[0] != ""
    assert discovery.host_of(0) == (own or discovery.host_of(0))
    assert discovery.host_of(1) == "there"
    assert discovery.host_names([0, 1]) == {0: socket.gethostname(), 1: "node1"}
    assert joined == [(0, *names(b"", "a token"))]
    assert len(joined[0][2]) == 16


def test_processes_that_claim_a_host_and_share_no_memory_are_named(runtime_of, monkeypatch):
    monkeypatch.setenv("JAX_RING_HOST_ID", "node7")
    own = discovery._own_memory()
    assert own
    others = [["node7", own, "a"], ["node7", "elsewhere\x1b[2J/1:2/0", "b"]]
    runtime_of(Client({f"jax_ring/host/{1 + i}": json.dumps(host).encode() for i, host in enumerate(others)}))
    discovery.publish()
    assert discovery.host_of(1) == "node7"
    for _ in range(2):
        with pytest.raises(RuntimeError, match="processes 0 and 2 both have JAX_RING_HOST_ID='node7'") as raised:
            discovery.host_of(2)
        assert f"/dev/shm is {own!r} in process 0 and 'elsewhere\\x1b[2J/1:2/0' in process 2" in str(raised.value)


def test_containers_without_shared_resources_are_different_hosts(monkeypatch, tmp_path):
    own = discovery._own_host()
    assert discovery._own_host() == own
    stat = discovery.os.stat
    monkeypatch.setattr(discovery.os, "stat", lambda path: stat(tmp_path))  # as the /dev/shm of another container
    assert discovery._own_host() != own
    monkeypatch.undo()
    monkeypatch.setattr(discovery.os, "geteuid", lambda: 12345)
    assert discovery._own_host() != own
    monkeypatch.setattr(discovery.pathlib.Path, "read_text", lambda path: (_ for _ in ()).throw(PermissionError(path)))
    assert discovery._own_host() != discovery._own_host()  # unknown, so different from every host


def test_each_runtime_has_its_own_token_and_counts(runtime_of):
    first = Client(token=b"")
    joined = runtime_of(first)
    discovery.publish()
    assert [discovery.next_number("jit_f") for _ in range(3)] == [0, 1, 2]
    assert discovery.next_number("jit_g") == 0
    runtime_of(None)
    assert discovery.publish() is None
    with pytest.raises(RuntimeError, match=r"in a program of 2 processes.*jax.distributed.initialize"):
        discovery.host_of(1)
    runtime_of(Client(token=b""))
    assert discovery.next_number("jit_f") == 0
    assert len(set(joined)) == 2


def test_the_first_process_sets_the_token(runtime_of):
    client = Client(token=b"made by process 1")
    assert runtime_of(client) == []
    discovery.publish()
    discovery.publish()
    assert runtime_of(client) == [(0, *names(b"", "made by process 1"))]


@pytest.mark.parametrize("their_secret", [None, "another secret of a job"])
def test_another_secret_is_an_error(runtime_of, monkeypatch, their_secret):
    """Before any memory is shared, in both."""
    if their_secret:
        monkeypatch.setenv("JAX_RING_SECRET", their_secret)
    client = Client({"jax_ring/host/1": json.dumps(["there", "", "node1"]).encode()})
    monkeypatch.setenv("JAX_RING_SECRET", "a secret of the job ")
    joined = runtime_of(client)
    discovery.publish()
    key = protocol.key_of_job(b"a secret of the job")
    assert joined == [(0, *names(key, "a token"))]
    assert not set(names(key, "a token")) & set(names(b"", "a token"))
    why = "who wrote it has another secret" if their_secret else "the process that wrote it has no secret"
    with pytest.raises(ForeignValueError, match=f"^the value of jax_ring/host/1 .* {why}.* set JAX_RING_SECRET to one"):
        discovery.host_of(1)


def test_a_secret_that_is_too_short(runtime_of, monkeypatch):
    monkeypatch.setenv("JAX_RING_SECRET", "0123456789abcde\n")
    runtime_of(Client())
    with pytest.raises(ValueError, match="the secret of JAX_RING_SECRET has 15 characters, and at least 16 are needed"):
        discovery.publish()


def test_a_process_that_does_not_publish_its_host(runtime_of):
    runtime_of(Client())
    with pytest.raises(RuntimeError, match=r"process 1 did not publish its host within 60 s.*JAX_RING_TIMEOUT"):
        discovery.host_of(1)


TOO_DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    "published",
    [b"\x80\x04", TOO_DEEP, b"3", b'["a", "b"]', b'["a", "", 3]', b'["a", "", "b", ""]', b'{"a": 1}', b'"abc"'],
)
def test_what_is_no_host_is_refused(runtime_of, published):
    runtime_of(Client({"jax_ring/host/1": published}))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^process 1 has published something else than its host: b"):
            discovery.host_of(1)


class FakeKernels:
    """A fake of the native module of kernels, with two GPUs without peer access."""

    def __init__(self):
        self.looks = 0

    def identities(self):
        self.looks += 1
        return [("0000:01:00.0", "a"), ("0000:02:00.0", "b")]

    def unreachable(self, ordinals):
        return [(0, 1)] if len(ordinals) == 2 else []


ONE, TWO = Identity("0000:01:00.0", "a"), Identity("0000:02:00.0", "b")
GPUS = Gpus((ONE, TWO), ((ONE, TWO),))


def test_gpus_are_published_as_soon_as_jax_may_use_them(runtime_of, monkeypatch):
    kernels = FakeKernels()
    monkeypatch.setattr(runtime, "cuda_kernels", kernels)
    client = Client()
    runtime_of(client)
    discovery.publish()
    assert "jax_ring/gpus/0" not in client.values  # the program may still choose its GPUs
    assert kernels.looks == 0
    discovery.publish_with_plugins()  # as JAX calls it
    assert read(value(client, "jax_ring/gpus/0"), Gpus) == GPUS
    discovery.publish()
    later = Client()
    runtime_of(later)
    discovery.publish()  # an earlier start of JAX counts
    assert read(value(later, "jax_ring/gpus/0"), Gpus) == GPUS
    assert kernels.looks == 1


def test_without_kernels_no_gpus_are_published(runtime_of, monkeypatch):
    monkeypatch.setattr(runtime, "cuda_kernels", None)
    client = Client()
    runtime_of(client)
    discovery.publish_with_plugins()
    assert set(client.values) == {"jax_ring/host/0", "jax_ring/token", "jax_ring/process/0"}


def test_gpus_of_other_processes_are_fetched_once(runtime_of, monkeypatch):
    monkeypatch.setattr(runtime, "cuda_kernels", FakeKernels())
    client = Client({"jax_ring/gpus/1": json.dumps(Gpus((TWO,))).encode()})
    runtime_of(client)
    for _ in range(2):
        assert discovery.gpus_of([0, 1]) == {0: GPUS, 1: Gpus((TWO,))}
    assert len(client.waits) == 1


@pytest.mark.parametrize("published", [
    b"\x80\x04", TOO_DEEP, b"3", b"[]", b'[["ab"], [], ""]', b'[[["a", 1]], [], ""]', b'[{"a": 1}, [], ""]',
    b'[[], [["a", "b"]], ""]', b'[[], [[["a", "b"]]], ""]', b'[[], [[["a", "b"], 1]], ""]', b'[[], 1, ""]',
])  # fmt: skip
def test_what_is_no_gpus_is_refused(runtime_of, monkeypatch, published):
    monkeypatch.setattr(runtime, "cuda_kernels", FakeKernels())
    runtime_of(Client({"jax_ring/gpus/1": published}))
    with pytest.raises(RuntimeError, match=r"^process 1 has published something else than its GPUs: b"):
        discovery.gpus_of([0, 1])


def test_all_processes_have_one_deadline(runtime_of, monkeypatch):
    monkeypatch.setattr(runtime, "cuda_kernels", FakeKernels())
    client = Client({f"jax_ring/gpus/{process}": json.dumps(Gpus((TWO,))).encode() for process in (1, 2)})
    runtime_of(client)
    monkeypatch.setattr(discovery.time, "monotonic", lambda: 100.0 + 25 * len(client.waits))  # each takes 25 s
    with pytest.raises(RuntimeError, match=r"process 3 did not publish its GPUs within 60 s.*JAX_RING_TIMEOUT_S"):
        discovery.gpus_of([0, 1, 2, 3])
    assert client.waits == [60_000, 35_000, 10_000]


def test_a_process_that_serves_no_gpus_waits_for_no_other(runtime_of, monkeypatch):
    monkeypatch.setattr(runtime, "cuda_kernels", None)
    client = Client()
    runtime_of(client)
    (gpus,) = discovery.gpus_of([0, 1]).values()
    assert "without its CUDA kernels" in gpus.why_not
    assert client.waits == []
    assert read(value(client, "jax_ring/gpus/0"), Gpus) == gpus  # others need not wait for this one


def test_one_process_needs_no_store(monkeypatch):
    monkeypatch.setattr(runtime, "cuda_kernels", FakeKernels())
    monkeypatch.setattr(store, "current", None)
    assert discovery.gpus_of([0]) == {0: GPUS}
