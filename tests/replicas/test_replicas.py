"""broadcast_params makes the copies of parameters equal; assert_replicated finds copies that differ."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, make_mesh, run_processes, sharded
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ring import assert_replicated, broadcast_params
from jax_ring.distributed import discovery
from jax_ring.training import replicas
from jax_ring.training.wire import reduced_by

RANKS = 4
MESH = make_mesh((RANKS,))
REPLICATED = P()


def with_copies(leaf, change):
    """A replicated array whose copy on each rank is `change(rank, copy)`."""
    copies = [change(rank, leaf.copy()) for rank in range(RANKS)]
    arrays = [jax.device_put(copy, device) for copy, device in zip(copies, MESH.devices, strict=True)]
    return jax.make_array_from_single_device_arrays(leaf.shape, NamedSharding(MESH, REPLICATED), arrays)


@pytest.mark.parametrize("impl", ["ring", "lax"])
@pytest.mark.parametrize("root", [0, 2])
def test_broadcast_params(root, impl, check_vma):
    values = np.random.default_rng(0).standard_normal((RANKS, 6)).astype(np.float32)
    values[:, 0], values[:, 1] = -0.0, np.nan
    params = {"w": values, "n": np.arange(RANKS * 2).reshape(RANKS, 2), "h": values.astype(jnp.bfloat16)}

    def body(params):
        return broadcast_params(jax.tree.map(lambda x: x[0], params), "i", root=root)

    result = sharded(reduced_by(impl)(body), mesh=MESH, out_specs=REPLICATED, check_vma=check_vma)(params)
    assert_replicated(result)
    assert_same_bits(result, jax.tree.map(lambda leaf: jnp.asarray(leaf)[root], params))


def test_equal_copies_pass():
    value = np.array([np.nan, -0.0, 1.0], np.float32)
    same = with_copies(value, lambda rank, copy: copy)
    assert_replicated({"a": same, "b": [np.ones(3), 3.0, None], "key": jax.random.key(0), "split": jnp.arange(4)})


def test_the_leaf_the_ranks_and_the_index_are_named():
    def change(rank, copy):
        if rank in (1, 3):
            copy[1, 2] += rank
        return copy

    tree = {"ok": jnp.ones(3), "layers": [{"w": with_copies(np.zeros((2, 3), np.float32), change)}]}
    with pytest.raises(AssertionError) as error:
        assert_replicated(tree)
    assert (
        "assert_replicated: ['layers'][0]['w'], of type float32[2, 3], is not the same on all ranks: 1, 3 differ from "
        "0. The first difference is at index (1, 2): 0.0 on rank 0, 1.0 on rank 1."
    ) in str(error.value)


@pytest.mark.parametrize(
    ("value", "other"),
    [(np.float32(0), np.float32(-0.0)), (np.int8(1), np.int8(2)), (np.float32(np.nan), np.float32(1))],
    ids=str,
)
def test_scalars_by_their_bits(value, other):
    array = with_copies(np.asarray(value), lambda rank, copy: np.asarray(other) if rank == 2 else copy)
    with pytest.raises(AssertionError, match=r"2 differs from 0. The first difference is at index \(\)"):
        assert_replicated(array)


def test_shards_are_compared_with_their_copies():
    mesh = make_mesh((2, 2), ("a", "b"))
    sharding = NamedSharding(mesh, P("a"))
    parts = [np.zeros(3), np.zeros(3), np.ones(3), np.array([1.0, 1.0, 2.0])]
    arrays = [jax.device_put(x.astype(np.float32), d) for x, d in zip(parts, mesh.devices.flat, strict=True)]
    array = jax.make_array_from_single_device_arrays((6,), sharding, arrays)
    with pytest.raises(AssertionError, match=r"3 differs from 2. The first difference is at index \(2,\) of the shard"):
        assert_replicated(array)
    assert_replicated(jax.device_put(np.arange(6.0), sharding))


def test_finds_wrong_out_specs():
    f = sharded(lambda x: x * 2, mesh=MESH, out_specs=REPLICATED, check_vma=False)
    with pytest.raises(AssertionError, match="1, 2, 3 differ from 0"):
        assert_replicated(f(jnp.arange(4.0)))


def test_refuses_tracers():
    with pytest.raises(TypeError, match="Call it outside jit"):
        jax.jit(lambda x: assert_replicated(x))(1.0)


PROCESS = """
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jax_ring import assert_replicated
jax.distributed.initialize("{address}", {processes}, {process})
sharding = NamedSharding(Mesh(jax.devices(), ("i",)), P())
def array(of_ranks):
    copies = [jax.device_put(of_ranks[jax.devices().index(d)], d) for d in jax.local_devices()]
    return jax.make_array_from_single_device_arrays(of_ranks[0].shape, sharding, copies)
same = np.arange(3)
large = [np.zeros((7, 100_000), np.float32) for _ in range(4)]
assert_replicated({{"fine": array([same] * 4), "w": array(large), "here": jax.numpy.ones(2)}})
large[2][5, 77_777:] = 1
large[3][6, 1] = 2
small = [np.float16(rank == 1) for rank in range(4)]
for tree in ({{"fine": array([same] * 4), "w": array(large)}}, array(small), {{"w{process}": array(small)}}):
    try:
        assert_replicated(tree)
    except (AssertionError, ValueError) as error:
        print(error)
jax.distributed.shutdown()
"""


@pytest.mark.full
def test_copies_of_other_processes():
    for i, text in enumerate(run_processes(PROCESS, [{}, {}], devices=2)):
        large, small, trees = text.splitlines()
        assert (
            "['w'], of type float32[7, 100000], is not the same on all ranks: 2, 3 differ from 0. "
            "The first difference is at index (5, 77777): 0.0 on rank 0, 1.0 on rank 2."
        ) in large
        # Both copies are on process 0; process 1 raises as well.
        assert "1 differs from 0. The first difference is at index (): 0.0 on rank 0, 1.0 on rank 1." in small
        assert f"{i} (here) and process {1 - i} (there) were given different data: \"['w{i}']: float16[]\"" in trees


PLACE = "(slice(None, None, None),)"


@pytest.fixture
def say(monkeypatch):
    """Calls assert_replicated for an array whose ranks 2 and 3 are on process 1, which says this in each round."""

    def compare(change, *said):
        rounds = iter(said)
        array = with_copies(np.arange(300.0), change)
        ranks, copies = replicas._ranks(array), [*replicas._copies(array)]
        monkeypatch.setattr(replicas, "_ranks", lambda _: [(rank // 2, place) for rank, (_, place) in enumerate(ranks)])
        monkeypatch.setattr(replicas, "_copies", lambda _: iter(copies[:2]))
        monkeypatch.setattr(discovery, "compare", lambda *_: None)
        monkeypatch.setattr(discovery, "next_number", lambda _: 0)
        monkeypatch.setattr(discovery, "gather", lambda _, own, *__: [(0, own), (1, next(rounds))])
        replicas._assert_copies_equal({"w": array}, replicas._gather_from({"w": array}, [0, 1]))

    return compare


def digests(*ranks, digest=None, place=PLACE):
    """What process 1 says of copies on these ranks, which are as the first one's, or have another digest."""
    digest = digest or replicas._digest(np.arange(300.0, dtype=np.float32))
    return json.dumps([[[place, rank, digest] for rank in ranks]]).encode()


def unchanged(rank, copy):
    return copy


def changed_on_2(rank, copy):
    return copy + (rank == 2)


def test_what_another_process_sends_of_its_copies(say):
    say(unchanged, digests(2, 3))
    say(unchanged, digests(3, 2))


@pytest.mark.parametrize(
    "theirs",
    [
        b"[", b"\xff", b"1", b"[[1]]", b'[[["slice", 0, 5]]]', b"[]", b"[" * 10**5, b"[[]]", b"[[], []]", digests(2),
        digests(2, 2), digests(0, 1), digests(2, 3, 3), digests(2, 3, 4), digests(1, 2, 3), digests(2, -1),
        digests(2, 3, place="elsewhere"),
    ],
)  # fmt: skip
def test_what_another_process_sends_is_checked(theirs, say):
    with pytest.raises(ValueError, match=r"^assert_replicated: process 1 has sent "):
        say(unchanged, theirs)


PARTS = [[2, ["a"] * 150]]


@pytest.mark.parametrize(
    ("parts", "values"),
    [
        ([], []), ([[3, ["a"] * 150]], []), ([[2, ["a"] * 149]], []), ([[2, []]], []), (PARTS * 2, []),
        ([*PARTS, [0, ["a"] * 150]], []), (PARTS, []), (PARTS, [[0, "1.0"]]), (PARTS, [[2, "1.0"], [3, "1.0"]]),
    ],
)  # fmt: skip
def test_what_another_process_sends_of_parts_is_checked(parts, values, say):
    rounds = [digests(2, 3, digest="a"), json.dumps(parts).encode()]
    rounds += [json.dumps([[2, ["a"] * 2]]).encode()] * (parts == PARTS)
    with pytest.raises(ValueError, match=r"^assert_replicated: process 1 has sent .* of (other|another)"):
        say(changed_on_2, *rounds, json.dumps(values).encode())


def test_copies_that_differ_in_no_part(say):
    of_rank_0 = [replicas._digest(np.arange(300, dtype=np.float32)[i : i + 2]) for i in range(0, 300, 2)]
    with pytest.raises(ValueError, match=r"the ranks 0, 2 differ, but none of their parts, .* the processes 0, 1 have"):
        say(changed_on_2, digests(2, 3, digest="a"), json.dumps([[2, of_rank_0]]).encode())


def test_what_another_process_says_of_a_value_is_escaped(say):
    rounds = [digests(2, 3, digest="a"), PARTS, [[2, ["a"] * 2]], [[2, "\x1b[2J\n"]]]
    with pytest.raises(AssertionError, match=r"index \(0,\): 0.0 on rank 0, \\x1b\[2J\\n on rank 2\."):
        say(changed_on_2, rounds[0], *(json.dumps(each).encode() for each in rounds[1:]))
