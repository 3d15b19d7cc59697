"""A process of test_jax.py. Usage: jax_rank.py COORDINATOR NUM_PROCESSES PROCESS_ID PART"""

import re
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ring
from jax_ring import override_lax, ring_all_to_all, ring_ppermute, ring_psum

TARGET = "jax_ring_all_reduce"


def make_global_array(mesh, make):
    """An array with row r equal to make(r). Each process makes only its own row."""
    shape = (mesh.size, *make(0).shape)
    return jax.make_array_from_callback(shape, NamedSharding(mesh, P("i")), lambda at: make(at[0].start)[None])


def local_shard(x) -> np.ndarray:
    return np.asarray(x.addressable_shards[0].data)


def mapped(mesh, fun):
    return jax.jit(jax.shard_map(fun, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False))


def check_sums(mesh) -> None:
    make = lambda rank: np.random.default_rng(rank).normal(size=(1003,)).astype(np.float32)  # noqa: E731
    rows = [make(rank) for rank in range(mesh.size)]
    want = rows[0]
    for row in rows[1:]:
        want = want + row
    x = make_global_array(mesh, make)
    for algorithm in ("auto", "one_shot", "two_shot", "ring"):
        psum = mapped(mesh, lambda x, a=algorithm: ring_psum(x, "i", algorithm=a))
        hlo = psum.lower(x).compile().as_text()
        assert TARGET in hlo, hlo
        assert "all-reduce" not in hlo, hlo
        np.testing.assert_array_equal(local_shard(psum(x))[0].view(np.uint32), want.view(np.uint32))
    # With any order a ring sums in its own: the same result on every rank.
    in_a_ring = mapped(mesh, lambda x: ring_psum(x, "i", algorithm="ring", order="any"))
    np.testing.assert_allclose(local_shard(in_a_ring(x))[0], want, rtol=1e-5, atol=1e-6)
    # A loop; a gradient; a tree of two dtypes.
    loop = mapped(mesh, lambda x: lax.fori_loop(0, 20, lambda _, y: ring_psum(y, "i") / mesh.size, x))
    np.testing.assert_allclose(local_shard(loop(x))[0], want / mesh.size, rtol=1e-4, atol=1e-6)
    square = mapped(mesh, jax.grad(lambda x: jnp.sum(ring_psum(x, "i") ** 2)))
    np.testing.assert_allclose(local_shard(square(x))[0], 2 * mesh.size * want, rtol=1e-5, atol=1e-5)
    tree = mapped(mesh, lambda x: ring_psum({"a": x, "b": x.astype(jnp.bfloat16), "c": x[:, :7]}, "i"))(x)
    np.testing.assert_allclose(local_shard(tree["c"])[0], want[:7], rtol=1e-5, atol=1e-6)
    assert tree["b"].dtype == jnp.bfloat16
    print("all sums are right")


def check_exchanges(mesh) -> None:
    """All-to-alls and permutations, alone, in a loop, backwards and in place of those of lax."""
    size = mesh.size
    make = lambda rank: np.random.default_rng(rank).normal(size=(size, 1003)).astype(np.float32)  # noqa: E731
    rows = np.stack([make(rank) for rank in range(size)])
    x, rank = make_global_array(mesh, make), jax.process_index()
    shift = [(i, (i + 1) % size) for i in range(size)]
    calls = {
        "all_to_all": (lambda x: ring_all_to_all(x, "i", 1, 1), rows[:, rank]),
        "permute": (lambda x: ring_ppermute(x, "i", shift), rows[rank - 1]),
        "a pair": (lambda x: ring_ppermute(x, "i", [(1, 0)]), rows[1] if rank == 0 else np.zeros_like(rows[0])),
        "loop": (
            lambda x: lax.fori_loop(0, 2 * size + 1, lambda _, y: ring_ppermute(y, "i", shift), x),
            rows[rank - 1],
        ),
        "backwards": (
            jax.grad(lambda x: (ring_ppermute(x, "i", shift) * ring_all_to_all(lax.stop_gradient(x), "i", 1, 1)).sum()),
            rows[:, (rank + 1) % size],
        ),
        "bfloat16": (
            lambda x: ring_all_to_all(x.astype(jnp.bfloat16), "i", 1, 1).astype(jnp.float32),
            np.asarray(jnp.asarray(rows[:, rank]).astype(jnp.bfloat16).astype(jnp.float32)),
        ),
    }
    for name, (call, want) in calls.items():
        compiled = mapped(mesh, call).lower(x).compile()
        hlo = compiled.as_text()
        assert "jax_ring_all_to_all" in hlo or "jax_ring_permute" in hlo, (name, hlo)
        assert not re.search(r" (collective-permute|all-to-all)(-start)?\(", hlo), (name, hlo)
        for _ in range(3):
            np.testing.assert_array_equal(local_shard(compiled(x))[0].view(np.uint32), want.view(np.uint32), name)
    with override_lax():
        swapped = mapped(mesh, lambda x: lax.ppermute(lax.all_to_all(x, "i", 1, 1), "i", shift))(x)
    np.testing.assert_array_equal(local_shard(swapped)[0], rows[:, rank - 1])
    print("all exchanges are right")


def check_family(mesh) -> None:
    """The other collectives, without a collective of XLA's, and with the bits of the definition where it has one."""
    size, rank = mesh.size, jax.process_index()
    make = lambda rank: np.random.default_rng(rank).normal(size=(size, 1003)).astype(np.float32)  # noqa: E731
    rows = np.stack([make(rank) for rank in range(size)])
    x = make_global_array(mesh, make)
    total = rows[0]
    for row in rows[1:]:
        total = total + row
    zeros = np.zeros_like(total)
    integers = (rows * np.float32(1e6)).astype(np.int32).sum(0, dtype=np.int32)
    calls = {
        "pmax": (lambda x: jax_ring.ring_pmax(x, "i"), rows.max(0)),
        "pmin": (lambda x: jax_ring.ring_pmin(x, "i"), rows.min(0)),
        "psum_scatter": (lambda x: jax_ring.ring_psum_scatter(x[0], "i")[None], total[rank]),
        "all_gather": (lambda x: jax_ring.ring_all_gather(x[0], "i")[None], rows),
        "broadcast": (lambda x: jax_ring.ring_broadcast(x, "i", root=size - 1), rows[-1]),
        "reduce": (lambda x: jax_ring.ring_reduce(x, "i", root=1), total if rank == 1 else zeros),
        "integers": (lambda x: ring_psum((x * 1e6).astype(jnp.int32), "i").astype(jnp.float32), integers),
        # In an order of their own, or divided as XLA divides.
        "pmean": (lambda x: jax_ring.ring_pmean(x, "i"), total / size),
        "in any order": (lambda x: ring_psum(x, "i", order="any"), total),
        "along the tree": (lambda x: ring_psum(x, "i", order="tree"), total),
    }
    for name, (call, want) in calls.items():
        compiled = mapped(mesh, call).lower(x).compile()
        hlo = compiled.as_text()
        assert "jax_ring_" in hlo, (name, hlo)
        assert not re.search(r" (all-reduce|reduce-scatter|all-gather|collective-broadcast)(-start)?\(", hlo), (
            name,
            hlo,
        )
        first = local_shard(compiled(x))
        for _ in range(3):
            np.testing.assert_array_equal(local_shard(compiled(x)).view(np.uint32), first.view(np.uint32), name)
        if name in ("pmean", "in any order", "along the tree"):
            np.testing.assert_allclose(first[0], want, rtol=1e-5, atol=1e-6, err_msg=name)
        else:
            want = want.astype(np.float32)
            np.testing.assert_array_equal(first[0].view(np.uint32), want.view(np.uint32), name)
    print("the family is right")


def check_training(mesh) -> None:
    """Steps whose reductions run beside the backward pass have the bits of steps in which they do not."""
    width, layers = 256, 6
    random = np.random.default_rng(0)
    replicated = NamedSharding(mesh, P())
    initial = [random.normal(0, 0.05, (width, width)).astype(np.float32) for _ in range(layers)]
    weights = [jax.make_array_from_callback(w.shape, replicated, lambda at, w=w: w[at]) for w in initial]
    data_of = lambda rank: np.random.default_rng(rank).normal(size=(64, width)).astype(np.float32)  # noqa: E731
    x = make_global_array(mesh, data_of)

    def loss(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    def steps_with(**options):
        def step(weights, x):
            value, gradients = jax_ring.value_and_grad(loss, "i", **options)(weights, x[0])
            return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)], value

        def steps(weights, x):
            values = []
            for _ in range(4):
                weights, value = step(weights, x)
                values.append(value)
            return weights, jnp.stack(values)

        mapped_steps = jax.shard_map(steps, mesh=mesh, in_specs=(P(), P("i")), out_specs=P(), check_vma=False)
        compiled = jax.jit(mapped_steps).lower(weights, x).compile()
        for _ in range(3):  # of the same weights: XLA may record a program only after the first
            trained, values = compiled(weights, x)
        return compiled.as_text(), [np.asarray(w) for w in trained], np.asarray(values)

    small_buckets = {"bucket_bytes": 2 * 4 * width**2, "first_bucket_bytes": 4 * width**2}
    beside, trained, values = steps_with(**small_buckets)
    alone, expected, _ = steps_with(overlap=False, **small_buckets)
    if jax.default_backend() == "gpu":
        assert re.search(r"async-start|call-start", beside), beside
        assert not re.search(r"async-start|call-start", alone), alone
    for got, want in zip(trained, expected, strict=True):
        np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))
    assert values[-1] < values[0], values
    # The same on one device, of all ranks' data.
    of_all = jax.jit(jax.value_and_grad(loss))
    own = initial
    for _ in range(4):
        _, gradients = of_all(own, np.concatenate([data_of(rank) for rank in range(mesh.size)]))
        own = [w - 0.1 * np.asarray(g) for w, g in zip(own, gradients, strict=True)]
    for got, want in zip(trained, own, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
    print("all steps are right")


def check_ordinary_jit(mesh) -> None:
    """Programs of `jit` alone, whose collectives XLA's partitioner inserts, under override_lax().

    A GPU that several ranks share has no collectives of XLA: NCCL refuses it. So the values are those of one device,
    the same bits where the sums are of small integers.
    """
    size, rank = mesh.size, jax.process_index()
    divided, whole = NamedSharding(mesh, P("i")), NamedSharding(mesh, P())
    columns = NamedSharding(mesh, P(None, "i"))
    # So many features that each rank can have as many.
    features, hidden, batch = 24 * size, 48 * size, 16 * size
    integers = lambda *shape: np.random.default_rng(0).integers(-8, 8, shape).astype(np.float32)  # noqa: E731
    placed = lambda x, sharding: jax.make_array_from_callback(x.shape, sharding, lambda at: x[at])  # noqa: E731
    x, w1, w2 = integers(batch, features), integers(features, hidden), integers(hidden, 3)

    def loss(params, x):
        hidden = jnp.tanh(x @ params[0] / 64)
        return jnp.mean((hidden @ params[1]) ** 2)

    def train(params, x):
        def step(params, _):
            value, gradients = jax.value_and_grad(loss)(params, x)
            return [p - 0.01 * g for p, g in zip(params, gradients, strict=True)], value

        return lax.scan(step, params, length=5)

    def tensor_parallel(x, w1, w2):  # as Megatron divides it: columns, then rows, and one sum
        return lax.with_sharding_constraint((x @ w1) @ w2, whole)

    calls = {
        "sum": (lambda x: x.sum(0), [(x, divided)], whole, True),
        "maximum": (lambda x: x.max(0), [(x, divided)], whole, True),
        "gather": (lambda x: x + 1, [(x, divided)], whole, True),
        "transpose": (lambda x: 2 * x, [(x, divided)], columns, True),
        "contraction": (lambda x, w: x @ w, [(x, columns), (w1, divided)], whole, True),
        "scatter": (lambda x, w: x @ w, [(x, columns), (w1, divided)], divided, True),
        "shift": (lambda x: jnp.roll(x, 1, 0), [(x, divided)], divided, True),
        "loop": (
            lambda x: lax.fori_loop(0, 9, lambda i, x: x - jnp.sign(x.sum(0)), x), [(x, divided)], divided, True,
        ),
        "tensor parallel": (tensor_parallel, [(x, whole), (w1, columns), (w2, divided)], whole, True),
        "training": (
            lambda x, *params: train(list(params), x), [(x, divided), (w1 / 8, whole), (w2 / 8, whole)], whole, False,
        ),
        "training with divided parameters": (
            lambda x, *params: train(list(params), x)[1], [(x, divided), (w1 / 8, divided), (w2 / 8, divided)], whole,
            False,
        ),
    }  # fmt: skip
    for name, (call, arguments, out, exact) in calls.items():
        want = jax.tree.leaves(jax.jit(call)(*[value for value, _ in arguments]))  # on this process's device alone
        with override_lax():
            compiled = jax.jit(call, out_shardings=out).lower(*[placed(*argument) for argument in arguments]).compile()
        hlo = compiled.as_text()
        left = re.search(r" (all-reduce|reduce-scatter|all-gather|all-to-all|collective-permute)(-start)?\(", hlo)
        assert "jax_ring_" in hlo, (name, hlo)
        assert not left, (name, left, hlo)
        for _ in range(3):  # XLA may record a program only after the first
            got = jax.tree.leaves(compiled(*[placed(*argument) for argument in arguments]))
            for a, b in zip(got, want, strict=True):
                shard = a.addressable_shards[0]
                if exact:
                    np.testing.assert_array_equal(np.asarray(shard.data), np.asarray(b)[shard.index], name)
                else:
                    np.testing.assert_allclose(np.asarray(shard.data), np.asarray(b)[shard.index], 2e-4, 1e-6, name)
        print(f"{name}: {len(re.findall('jax_ring_[a-z_]+', hlo))} calls, rank {rank}")
    print("all ordinary programs are right")


def check_recorded(mesh) -> None:
    """Runs a loop that XLA records, several times: it may record only after the first."""
    make = lambda rank: np.arange(1003, dtype=np.float32) + rank  # noqa: E731
    x = make_global_array(mesh, make)
    want = np.mean([make(rank) for rank in range(mesh.size)], axis=0)  # exact: small integers, and few ranks

    def recorded_loop(x):
        return lax.fori_loop(0, 20, lambda _, y: ring_psum(y, "i") / mesh.size, x)

    loop = mapped(mesh, recorded_loop)
    for _ in range(5):
        np.testing.assert_array_equal(local_shard(loop(x))[0], want)
        x = make_global_array(mesh, make)  # in other memory, so that the graph has to be updated
    print("all recorded sums are right")


def compile_beside_a_loop(mesh) -> None:
    """A thread compiles, connects and runs a call of another group while a loop of calls runs."""
    x = make_global_array(mesh, lambda rank: np.full((1003,), rank, np.float32))
    backwards = [list(range(mesh.size))[::-1]]  # the same GPUs, but another group
    loop = mapped(mesh, lambda x: lax.fori_loop(0, 200, lambda _, y: ring_psum(y, "i") / mesh.size, x))
    other = mapped(mesh, lambda x: ring_psum(x, "i", axis_index_groups=backwards))
    loop(x).block_until_ready()
    results = []

    def run_other() -> None:
        compiled = other.lower(x).compile()
        results.append(running.is_ready())
        results.append(local_shard(compiled(x)))

    running = loop(x)
    thread = threading.Thread(target=run_other)
    thread.start()
    thread.join()
    np.testing.assert_array_equal(results[1][0], np.full((1003,), mesh.size * (mesh.size - 1) / 2))
    np.testing.assert_array_equal(local_shard(running)[0], np.full((1003,), (mesh.size - 1) / 2))
    print(
        f"both are right; when the other program was compiled, the loop {'had ended' if results[0] else 'was running'}"
    )


def skip_a_call(mesh) -> None:
    x = make_global_array(mesh, lambda rank: np.ones((4,), np.float32))

    def some_call(x):
        return lax.cond(lax.axis_index("i") == 0, lambda x: ring_psum(x, "i"), lambda x: x, x)

    call = mapped(mesh, some_call)
    for _ in range(2):  # the first call fails on the GPU; the second one reports the error
        try:
            jax.block_until_ready(call(x))
        except jax.errors.JaxRuntimeError as error:
            print("JaxRuntimeError:", error)
    print("the process continues:", jnp.arange(3).sum())


def go_on_after_a_failure(mesh) -> None:
    """After a failure, and after all processes have forgotten their groups, the same programs run again."""
    skip_a_call(mesh)
    jax.clear_caches()
    jax_ring.runtime.forget_gpu_groups()
    check_sums(mesh)


def main(coordinator: str, count: str, process: str, part: str) -> None:
    jax.config.update("jax_default_matmul_precision", "highest")  # GPUs would round the factors of float32 products
    jax.distributed.initialize(coordinator, int(count), int(process), local_device_ids=[0])
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("i",))
    assert mesh.size == int(count)
    parts = {
        "sums": check_sums, "exchanges": check_exchanges, "family": check_family, "training": check_training,
        "ordinary": check_ordinary_jit,
        "recorded": check_recorded, "beside": compile_beside_a_loop, "skip": skip_a_call,
        "go on": go_on_after_a_failure,
    }  # fmt: skip
    parts[part](mesh)


if __name__ == "__main__":
    main(*sys.argv[1:])
