"""All-to-all, permutations and broadcasts: dimensions, ranks and derivatives, against numpy and lax."""

import contextlib
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from collectives import COLLECTIVES, PERM, SHAPE, exchange, permutation, vary
from helpers import RANKS, assert_matches_lax, make_mesh, num_calls, ours_and_lax, run_python, sharded
from jax import lax
from jax._src import config as _config
from jax.sharding import PartitionSpec as P

import jax_ring
from jax_ring import ring_all_to_all, ring_pbroadcast, ring_ppermute, ring_pshuffle, ring_pswapaxes

# A cube, so that every dimension can be split in both ways.
CUBE = np.random.default_rng(0).standard_normal((RANKS, RANKS, RANKS, 2 * RANKS)).astype(np.float32)
X = (np.arange(RANKS * np.prod(SHAPE)) % 7 - 3).astype(np.float32).reshape(RANKS * SHAPE[0], SHAPE[1])
EXCHANGES = [
    *[(split, concat, True) for split, concat in itertools.product(range(3), repeat=2)],
    *[(split, concat, False) for split, concat in itertools.product(range(2), range(3))],
    (-1, 0, True), (0, -1, True), (-2, -3, False), (-3, -1, False),
]  # fmt: skip
# Enough of them for derivatives.
SOME = [(0, 1, False), (1, 0, False), (0, 0, False), (0, 2, True), (2, 1, True)]
GROUPS = [[5, 0, 3, 6], [2, 7, 4, 1]]


def pairs_of(exchanges=EXCHANGES):
    """The calls, and their expected results for dimensions that count from the front."""
    for split, concat, tiled in exchanges:
        yield exchange(split, concat, tiled), exchange(split % 3, concat % 3, tiled).oracle


# All-to-all.


@pytest.mark.full
def test_every_pair_of_dimensions(check_vma):
    # One program, which is faster.
    f = sharded(lambda x: [pair.ring(x[0], "i")[None] for pair, _ in pairs_of()], check_vma=check_vma)
    for result, (_, oracle), case in zip(f(CUBE), pairs_of(), EXCHANGES, strict=True):
        np.testing.assert_array_equal(np.asarray(result), oracle(CUBE), err_msg=str(case))


def test_matches_lax(check_vma):
    forward = [case for case in EXCHANGES if min(case[:2]) >= 0]  # lax of JAX 0.10 takes no other dimensions

    def body(fun, x):
        return [fun(x[0], "i", split, concat, tiled=tiled)[None] for split, concat, tiled in forward]

    assert_matches_lax(body, CUBE, pair=(ring_all_to_all, lax.all_to_all), check_vma=check_vma)


@pytest.mark.full
def test_derivatives_are_those_of_the_dense_computation(check_vma):
    # Not of lax: for split_axis != concat_axis and tiled=False its transpose has the wrong shape, or is wrong.
    weights = np.random.default_rng(1).standard_normal(64).astype(np.float32)

    def weigh(y):
        return jnp.sum(jnp.sin(y) * jnp.resize(weights, y.size).reshape(y.shape))

    def on_devices(x):
        def loss(x):
            return sum(weigh(pair.ring(x * x, "i")) for pair, _ in pairs_of(SOME))

        grad = jax.grad(loss)
        return grad(x[0])[None], jax.jvp(grad, (x[0],), (jnp.cos(x[0]),))[1][None]

    def dense(x):
        def loss(x):
            return sum(jax.vmap(weigh)(_dense(x * x, split, concat, tiled)).sum() for split, concat, tiled in SOME)

        grad = jax.grad(loss)
        return grad(x), jax.jvp(grad, (x,), (jnp.cos(x),))[1]

    for ours, expected in zip(sharded(on_devices, check_vma=check_vma)(CUBE), jax.jit(dense)(CUBE), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=2e-4, atol=2e-4)


def _dense(x, split, concat, tiled):
    """The stacked results for stacked operands."""
    parts = jnp.stack(jnp.split(x, RANKS, split + 1))  # (receiver, source, ...)
    parts = jnp.moveaxis(parts if tiled else parts.squeeze(split + 2), 1, concat + 1)
    return parts if not tiled else jnp.concatenate(jnp.split(parts, RANKS, concat + 1), concat + 2).squeeze(concat + 1)


@pytest.mark.full
def test_over_a_vmap_axis_and_batched():
    def over_the_batch(x, dim):
        return [jax.vmap(lambda x, pair=pair: pair.ring(x, "v"), dim, axis_name="v")(x) for pair, _ in pairs_of()]

    for dim in (0, 2):
        results = jax.jit(over_the_batch, static_argnums=1)(np.moveaxis(CUBE, 0, dim), dim)
        for result, (_, oracle) in zip(results, pairs_of(), strict=True):
            np.testing.assert_array_equal(result, oracle(CUBE))

    def batched(x):
        stacked = jnp.stack([x[0], x[0] + 1], 0)
        results = []
        for pair, _ in pairs_of(SOME):
            for dim in range(4):
                batch = jax.vmap(lambda x, pair=pair: pair.ring(x, "i"), dim)(jnp.moveaxis(stacked, 0, dim))
                results.append(batch - jnp.stack([pair.ring(x, "i") for x in stacked]))
        return sum(jnp.abs(result).sum() for result in results)[None]

    np.testing.assert_array_equal(sharded(batched)(CUBE), 0)


@pytest.mark.full
@pytest.mark.parametrize("tiled", [True, False])
def test_groups_batched_and_differentiated(tiled):
    # lax refuses groups in a batch. Of the dimensions that it takes without tiles, one is as long as a group.
    x = CUBE[:, :, :4]

    def body(x):
        call = lambda x: ring_all_to_all(x, "i", 1, 0, axis_index_groups=GROUPS, tiled=tiled)  # noqa: E731
        batch = jax.vmap(call, 2, 2)(x[0])
        y, pull = jax.vjp(call, x[0])
        return batch[None], jnp.stack([y.sum(), pull(y)[0].sum()])[None], pull(y)[0][None]

    batch, sums, pulled = sharded(body, check_vma=False)(x)
    oracle = exchange(1, 0, tiled=tiled).oracle
    for group in GROUPS:
        expected = oracle(x[group])
        np.testing.assert_array_equal(np.asarray(batch)[group], np.moveaxis(expected, -1, 3))
    np.testing.assert_array_equal(pulled, x)
    np.testing.assert_allclose(sums[:, 1], x.sum((1, 2, 3)), rtol=1e-4)


@pytest.mark.full
def test_swap_axes_matches_lax(check_vma):
    assert_matches_lax(
        lambda fun, x: [fun(x[0], "i", axis)[None] for axis in (0, 1)], CUBE,
        pair=(ring_pswapaxes, lax.pswapaxes), check_vma=check_vma,
    )  # fmt: skip


# Permutations.


PERMUTATIONS = {
    "rotation": [(k, (k + 3) % RANKS) for k in range(RANKS)],
    "to itself": [(k, k) for k in range(RANKS)],
    "some": PERM,
    "none": [],
    "one": ((6, 1),),
    "from the end": [(-1, 0), (0, -1), (-8, 3)][:2],
    "lists": [[1, 2], [np.int32(2), np.int64(1)]],
}


@pytest.mark.parametrize("perm", PERMUTATIONS.values(), ids=PERMUTATIONS.keys())
def test_permutations_match_lax(perm, check_vma):
    def body(fun, x):
        gradient = jax.grad(lambda x: jnp.sum(fun(x, "i", perm) ** 2 * (1 + lax.axis_index("i"))))
        return fun(x, "i", perm), jax.jvp(gradient, (x,), (x,))[1]

    assert_matches_lax(body, X, pair=(ring_ppermute, lax.ppermute), check_vma=check_vma)


@pytest.mark.full
@pytest.mark.parametrize("perm", PERMUTATIONS.values(), ids=PERMUTATIONS.keys())
def test_permutations_over_a_vmap_axis(perm):
    # Not compared with lax, which takes full permutations only.
    x = np.arange(RANKS)
    np.testing.assert_array_equal(
        jax.vmap(lambda x: ring_ppermute(x, "v", perm), axis_name="v")(x),
        permutation([(int(source), int(receiver)) for source, receiver in perm]).oracle(x),
    )


@pytest.mark.full
def test_shuffle_matches_lax(check_vma):
    for perm in ([3, 1, 4, 0, 5, 2, 7, 6], range(RANKS), [2, 0, 1]):
        assert_matches_lax(
            lambda fun, x, perm=perm: fun(x, "i", perm), X, pair=(ring_pshuffle, lax.pshuffle), check_vma=check_vma
        )


@pytest.mark.full
@pytest.mark.parametrize("axes", [("i", "j"), ("j", "i"), ("j", "k"), ("k", "j")], ids=str)
def test_axes_of_a_permutation_in_any_order(axes, check_vma):
    # JAX 0.10 counts ranks in the mesh's order, and 0.12 refuses another one unless told to allow it.
    mesh = make_mesh((2, 1, 4), ("i", "k", "j"))
    perm = [(0, 1), (1, 3), (2, 0)]
    x = X.reshape(RANKS, -1)
    spec = P(("i", "k", "j"))
    options = {"mesh": mesh, "in_specs": spec, "out_specs": spec, "check_vma": check_vma}
    if axes == ("j", "i") and jax.__version_info__ >= (0, 12):
        for fun in ours_and_lax(ring_ppermute, lax.ppermute):
            with pytest.raises(RuntimeError, match="order"):
                sharded(lambda x, fun=fun: fun(x, axes, perm), **options)(x)
        allowed = _config.raise_on_ppermute_sort_diff(False)  # an option that is not among the names of jax
    else:
        allowed = contextlib.nullcontext()
    with allowed:
        assert_matches_lax(lambda fun, x: fun(x, axes, perm), x, pair=(ring_ppermute, lax.ppermute), **options)


@pytest.mark.full
def test_equal_permutations_merge_and_others_do_not():
    def body(x):
        ahead = PERMUTATIONS["rotation"]
        return ring_ppermute(x, "i", ahead), ring_ppermute(x, "i", tuple(ahead)), ring_ppermute(x, "i", PERM)

    assert num_calls(sharded(body), X) == 2


# Broadcast.


@pytest.mark.full
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_broadcast_moves_bits(dynamic, check_vma):
    # All patterns, NaNs included.
    bits = np.random.default_rng(0).integers(0, 256, (RANKS, 256), np.uint8)
    dtypes = [
        np.float32,
        np.complex64,
        np.int16,
        *[getattr(ml_dtypes, name) for name in ("bfloat16", "float8_e8m0fnu")],
    ]
    trees = [{str(i): bits.view(dtype) for i, dtype in enumerate(dtypes)} | {"bool": bits > 100}]
    trees[0]["int4"] = (bits % 16).astype(np.int8).astype(ml_dtypes.int4)
    for source in (0, 5):

        def body(tree, source=source):
            received = ring_pbroadcast(tree, "i", jnp.int32(source) if dynamic else source)
            for x in jax.tree.leaves(received):
                assert not check_vma or jax.typeof(x).mat.varying == {"i"}
            return received

        for tree in trees:
            received = sharded(body, check_vma=check_vma)(tree)
            for name, x in tree.items():
                assert np.asarray(received[name]).tobytes() == np.stack([x[source]] * RANKS).tobytes(), name


@pytest.mark.full
@pytest.mark.parametrize("source", [3, jnp.int32(3)], ids=["static", "dynamic"])
def test_derivatives_of_a_broadcast(source, check_vma):
    def body(x):
        def loss(x):
            return jnp.sum(ring_pbroadcast(x * x, "i", source) * (1 + lax.axis_index("i")))

        tangent = jax.jvp(lambda x: ring_pbroadcast(x, "i", source), (x,), (2 * x,))[1]
        remat = jax.grad(lambda x: jax.checkpoint(loss)(x))
        return remat(x), tangent, jax.jvp(jax.grad(loss), (x,), (x,))[1]

    gradient, tangent, second = sharded(body, check_vma=check_vma)(X)
    values = X.reshape(RANKS, *SHAPE)
    expected = np.zeros_like(values)
    expected[3] = 2 * values[3] * np.arange(1, RANKS + 1).sum()
    np.testing.assert_array_equal(gradient, expected.reshape(X.shape))
    np.testing.assert_array_equal(second, expected.reshape(X.shape))
    np.testing.assert_array_equal(tangent, np.tile(2 * values[3], (RANKS, 1)))


@pytest.mark.full
def test_broadcast_over_a_vmap_axis():
    x = np.arange(RANKS, dtype=np.float32)
    for source in (2, jnp.int32(2)):
        f = jax.vmap(lambda x, source=source: ring_pbroadcast(x, "v", source), axis_name="v")
        np.testing.assert_array_equal(f(x), [2] * RANKS)
        np.testing.assert_array_equal(jax.vmap(jax.grad(f.__wrapped__), axis_name="v")(x), 8 * (x == 2))
    batched = sharded(lambda x: jax.vmap(lambda x, s: ring_pbroadcast(x, "i", s))(x, jnp.array([1, 5])))
    np.testing.assert_array_equal(batched(np.arange(16.0)), [2, 11] * RANKS)


# What jax.lax gives for the same call, error types included.


def of(ours, theirs):
    return lambda fun: ours if fun == "ring" else theirs


A2A, PERMUTE, SHUFFLE = (
    of(ring_all_to_all, lax.all_to_all), of(ring_ppermute, lax.ppermute), of(ring_pshuffle, lax.pshuffle),
)  # fmt: skip
ERRORS = {
    "split out of range": (lambda f, x: A2A(f)(x, "i", 2, 0), (ValueError, IndexError), "split_axis 2 is out of"),
    "concat out of range": (
        lambda f, x: A2A(f)(x, "i", 0, -4, tiled=True), (ValueError, IndexError, AssertionError), "concat_axis -4"
    ),
    "not divisible": (lambda f, x: A2A(f)(x[:3], "i", 0, 0, tiled=True), ValueError, r"0, 3, must be a multiple .*, 8"),
    "wrong size": (lambda f, x: A2A(f)(x[:3], "i", 0, 0), ValueError, r"as many elements as there are ranks, 8; got f"),
    "no axis of that name": (lambda f, x: A2A(f)(x, "k", 0, 0), NameError, "unbound axis name"),
    "no such rank": (lambda f, x: PERMUTE(f)(x, "i", [(8, 0)]), IndexError, r"perm has the ranks \[8\]"),
    "no such receiver": (lambda f, x: PERMUTE(f)(x, "i", [(0, -9)]), IndexError, r"the ranks \[-9\], .* 0 to 7"),
    "a source twice": (lambda f, x: PERMUTE(f)(x, "i", [(0, 1), (-8, 2)]), ValueError, r"the source .* has \[0\]"),
    "a receiver twice": (lambda f, x: PERMUTE(f)(x, "i", [(0, 1), (2, 1)]), ValueError, r"the receiver .* has \[1\]"),
    "three ranks": (lambda f, x: PERMUTE(f)(x, "i", [(0, 1, 2)]), ValueError, "must consist of pairs"),
    "not a rank": (lambda f, x: PERMUTE(f)(x, "i", [(0.5, 1)]), TypeError, "integer"),
    "no list": (lambda f, x: PERMUTE(f)(x, "i", None), TypeError, "must consist of pairs"),
    "not an array": (lambda f, x: PERMUTE(f)("text", "i", PERM), TypeError, "valid JAX"),
    "not a permutation": (lambda f, x: SHUFFLE(f)(x, "i", [0, 0, 1]), ValueError, r"from 0 to 2 once, got \[0, 0, 1\]"),
    "too long": (lambda f, x: SHUFFLE(f)(x, "i", list(range(9))), (ValueError, IndexError), r"ranks \[8\]"),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_errors_are_those_of_lax(case, check_vma):
    call, exceptions, message = ERRORS[case]
    with pytest.raises(exceptions, match=f"(?s)ring_.*{message}|^{message}|{message}"):
        jax.make_jaxpr(sharded(lambda x: call("ring", x), check_vma=check_vma))(X)
    with pytest.raises(exceptions):
        sharded(lambda x: call("lax", x), check_vma=check_vma).lower(X)


@pytest.mark.full
@pytest.mark.parametrize(
    ("source", "exception"),
    [(8, ValueError), (-1, ValueError), (1.5, TypeError), (jnp.arange(2), ValueError), (jnp.float32(1), TypeError)],
    ids=str,
)
def test_sources_that_are_no_rank(source, exception, check_vma):
    with pytest.raises(exception, match=r"ring_pbroadcast|integer"):
        jax.make_jaxpr(sharded(lambda x: ring_pbroadcast(x, "i", source), check_vma=check_vma))(X)


@pytest.mark.full
def test_no_axes_are_one_rank():
    tree = {"a": X, "b": [X + 1]}
    assert jax.tree.all(jax.tree.map(np.array_equal, ring_ppermute(tree, (), [(0, 0)]), tree))
    assert not np.any(ring_ppermute(X, (), []))
    np.testing.assert_array_equal(ring_pbroadcast(X, (), 0), X)
    np.testing.assert_array_equal(ring_all_to_all(X, (), 0, 1, tiled=True), X)
    np.testing.assert_array_equal(ring_all_to_all(X[:1], (), 0, 1), X[:1].T)


@pytest.mark.full
def test_random_keys_match_lax(check_vma):
    def body(fun, x):
        keys = jax.random.wrap_key_data(lax.bitcast_convert_type(x, jnp.uint32).reshape(RANKS, -1, 2))
        moved = fun(keys, "i", 0, 1, tiled=True) if "all_to_all" in str(fun) else fun(keys, "i", PERM)
        assert moved.dtype == keys.dtype
        return jax.random.key_data(moved)

    for pair in ((ring_all_to_all, lax.all_to_all), (ring_ppermute, lax.ppermute)):
        assert_matches_lax(body, X, pair=pair, check_vma=check_vma)


@pytest.mark.full
def test_exported_with_symbolic_shapes_xla_serves_them(caplog):
    mesh = make_mesh((4,))
    n = jax.export.symbolic_shape("n")[0]
    spec = jax.ShapeDtypeStruct((4 * n, 8), np.float32, sharding=jax.NamedSharding(mesh, P("i")))
    values = np.random.default_rng(0).standard_normal((4, 3, 8)).astype(np.float32)
    for body, oracle in (
        (lambda x: ring_ppermute(x, "i", [(0, 2), (3, 1)]), permutation([(0, 2), (3, 1)]).oracle),
        (lambda x: ring_all_to_all(x, "i", 1, 0, tiled=True), exchange(1, 0, tiled=True).oracle),
    ):
        with caplog.at_level("INFO", logger="jax_ring"):
            exported = jax.export.export(sharded(body, mesh=mesh))(spec)
        assert "JAX does not refine custom calls of a symbolic shape" in caplog.records[-1].getMessage()
        x = jax.device_put(values.reshape(12, 8), spec.sharding)
        result = np.asarray(jax.jit(exported.call)(x))
        np.testing.assert_array_equal(result.reshape(oracle(values).shape), oracle(values))


@pytest.mark.full
def test_a_static_shape_is_exported_with_the_engine():
    mesh = make_mesh((4,))
    x = jax.device_put(X[:16], jax.NamedSharding(mesh, P("i")))
    checks = [jax.export.DisabledSafetyCheck.custom_call(f"jax_ring_{kind}") for kind in ("permute", "all_to_all")]
    f = sharded(lambda x: ring_all_to_all(ring_ppermute(x, "i", [(0, 1)]), "i", 0, 1, tiled=True), mesh=mesh)
    exported = jax.export.export(f, disabled_checks=checks)(x)
    assert "jax_ring_permute" in exported.mlir_module()
    np.testing.assert_array_equal(jax.jit(jax.export.deserialize(exported.serialize()).call)(x), f(x))


@pytest.mark.full
def test_explanation():
    def body(x):
        x = ring_ppermute(x, "i", PERM)
        return ring_pbroadcast(ring_all_to_all(x, "i", 1, 0, tiled=True), "i", 2)

    f = sharded(body, check_vma=False)
    found = jax_ring.explain(f, X)
    assert [(call.name, call.operands, call.served_by) for call in found.collectives] == [
        ("ring_ppermute", ("float32[8,16]",), "jax_ring"),
        ("ring_all_to_all", ("float32[8,16]",), "jax_ring"),
        ("ring_broadcast", ("float32[64,2]",), "jax_ring"),
    ]
    # In bytes that a rank sends on average, of 512: all of them by six ranks of eight, and 7/8 of them.
    assert [call.wire_bytes for call in found.collectives][:2] == [384, 448]
    assert found.predicted_bytes == found.counted_bytes
    assert all("test_exchange.py" in call.call_site for call in found.collectives)


@pytest.mark.full
def test_types_vary_over_the_axes():
    mesh = make_mesh((2, 4), ("i", "j"))

    def body(x):
        for y in (
            ring_ppermute(x, "j", [(0, 1)]), ring_all_to_all(x, "j", 0, 1, tiled=True), ring_pbroadcast(x, "j", 1),
            ring_pbroadcast(x, "j", jnp.int32(1)), ring_ppermute(jnp.ones(3), "j", [(0, 1)]),
        ):  # fmt: skip
            assert jax.typeof(y).mat.varying in ({"i", "j"}, {"j"})
        return vary(x, "j")

    sharded(body, mesh=mesh, in_specs=P("i"), out_specs=P(("i", "j"))).lower(X)


@pytest.mark.full
def test_the_table_has_these_functions():
    assert {"all_to_all", "ppermute"} <= COLLECTIVES.keys()


@pytest.mark.full
def test_a_missing_rank_is_named():
    result = run_python(
        """
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P
from jax_ring import ring_all_to_all, ring_ppermute, ring_ragged_all_to_all
mesh = Mesh(jax.devices(), ("i",))
calls = [
    lambda x: ring_ppermute(x, "i", [(0, 1)]),
    lambda x: ring_all_to_all(x, "i", 0, 0),
    lambda x: ring_ragged_all_to_all(x, x, *[jnp.zeros(4, int)] * 4, axis_name="i"),
]
for call in calls:
    def body(x):
        return lax.cond(lax.axis_index("i") == 2, lambda x: x, call, x)
    try:
        jax.block_until_ready(
            jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False))(jnp.ones(16))
        )
    except jax.errors.JaxRuntimeError as error:
        print(str(error).replace(chr(10), " "))
""",
        devices=4,
        JAX_RING_TIMEOUT_S="1",
    )
    permute, exchange, ragged = result.stdout.splitlines()
    assert "ring_ppermute of float32[4] over axis 'i'" in permute
    assert "ring_all_to_all of float32[4] over axis 'i'" in exchange
    assert "ring_ragged_all_to_all of float32[4]" in ragged
    assert all("Missing: rank 2 " in line for line in (permute, exchange, ragged))
