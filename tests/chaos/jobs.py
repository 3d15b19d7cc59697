"""What the processes of the chaos program run: sums in long loops, checked in the program, until something happens.

`sums` is a body for `watched.Processes`. As a script, for `jax_ring.launch`, this file runs one of SCRIPTS.
"""

import os
import pathlib
import sys
import time

CALLS, CALLS_BETWEEN_HOSTS = 500, 5  # of a loop
COUNTS = (1, 40, 3000)  # elements of a message: each of the engine's algorithms serves one
POLL = 0.02


def sums(seed: int, folder: str, restarts: bool = False) -> None:
    """Sums until an error or the file `end`; prints "ready", "calls N", and "failed: ..." or "done".

    Where `restarts`, it waits after an error for the file `dead-N`, with N the processes that have failed so far, and
    goes on without these.
    """
    import jax

    own, dead, num_calls = jax.process_index(), [], 0
    while True:
        run = loop_of([device for device in jax.devices() if device.process_index not in dead], seed + len(dead))
        print(f"ready {len(dead)}", flush=True)
        try:
            while run(os.path.exists(pathlib.Path(folder, "end"))):
                num_calls += CALLS
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            print(f"failed: {' '.join(str(error).split())}", flush=True)
            check_alone()
        else:
            break
        if not restarts:
            break
        while not (known := list(pathlib.Path(folder).glob(f"dead-{len(dead) + 1}"))):
            if os.path.exists(pathlib.Path(folder, "end")):
                break
            time.sleep(POLL)
        if not known:
            break
        dead = [int(i) for i in known[0].read_text().split()]
        if own in dead:
            break
    print(f"calls {num_calls}\ndone", flush=True)
    while not os.path.exists(pathlib.Path(folder, "last" if own == 0 else "end")):
        time.sleep(POLL)


def loop_of(devices: list, seed: int, calls: int = CALLS):
    """A function that makes so many calls among all ranks, and raises AssertionError if a sum is wrong.

    It takes whether this process wants to end, and returns whether none does: so all leave after the same call. The
    operands change from call to call. The sums of integers are known without a collective.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax import lax
    from jax.sharding import Mesh
    from jax.sharding import PartitionSpec as P

    from jax_ring import ring_psum

    ranks, count = len(devices), COUNTS[seed % len(COUNTS)]
    mesh = Mesh(np.array(devices), ("i",))
    ring = jnp.arange(count, dtype=jnp.int32)

    def body(start, ends):
        rank = lax.axis_index("i")

        def one(i, wrong):
            step = start[0] + i
            total = ring_psum(ring * (rank + 1) + step * rank, "i")
            want = ring * (ranks * (ranks + 1) // 2) + step * (ranks * (ranks - 1) // 2)
            return wrong + jnp.sum(total != want)

        return lax.fori_loop(0, calls, one, jnp.int32(0))[None], ring_psum(ends, "i")

    f = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False))
    sharding = jax.NamedSharding(mesh, P("i"))
    number = 0

    def spread(value: int):
        return jax.make_array_from_callback((ranks,), sharding, lambda index: np.full(ranks, value, np.int32)[index])

    def run(ends: bool = False) -> bool:
        nonlocal number
        wrong, ending = f(spread(number * calls), spread(ends))
        number += 1
        for shard in wrong.addressable_shards:
            assert not np.asarray(shard.data).any(), f"WRONG BITS in {np.asarray(shard.data)} of {calls} calls"
        return not np.asarray(ending.addressable_shards[0].data).any()

    return run


def check_alone() -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np

    np.testing.assert_array_equal(jax.jit(lambda x: x * 2)(jnp.arange(3)), [0, 2, 4])


def other_call(folder: str, victim: int) -> None:
    """One process makes a call of another shape."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh
    from jax.sharding import PartitionSpec as P

    from jax_ring import ring_psum

    mesh = Mesh(np.array(jax.devices()), ("i",))
    count = 5 if jax.process_index() == victim else 4
    f = jax.jit(jax.shard_map(lambda: ring_psum(jnp.ones(count), "i"), mesh=mesh, in_specs=(), out_specs=P()))
    _print_error(lambda: jax.block_until_ready(f()))
    _await_end(folder)


def first_call(folder: str, limited: str, room: int) -> None:
    """The first call between processes, with room for so much more of what is limited: see `_limit`."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh
    from jax.sharding import PartitionSpec as P

    from jax_ring import ring_psum

    jax.block_until_ready(jax.jit(lambda x: x * 2)(jnp.arange(100_000)))
    mesh = Mesh(np.array(jax.devices()), ("i",))
    ones = jax.make_array_from_callback((mesh.size, 9), jax.NamedSharding(mesh, P("i")), lambda i: np.ones((1, 9)))
    f = jax.jit(jax.shard_map(lambda x: ring_psum(x, "i"), mesh=mesh, in_specs=P("i"), out_specs=P("i")))
    if limited != "nothing":
        f = f.lower(ones).compile()
        _limit(limited, room)

    def call():
        for shard in jax.block_until_ready(f(ones)).addressable_shards:
            if (np.asarray(shard.data) != mesh.size).any():
                sys.exit("WRONG BITS")  # which is no error that the others may have had

    for _ in range(2):  # a second call fails as the first did
        _print_error(call)
    print("went on", flush=True)
    _await_end(folder)


def _limit(what: str, room: int) -> None:
    """Lets this process start so many more "threads", open so many "files", or map so many MiB of "memory"."""
    import resource

    if what == "files":
        lowest = os.dup(0)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + room, lowest + room))
    elif what == "memory":
        mapped = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (mapped + (room << 20), mapped + (room << 20)))
    else:
        now = len(os.listdir("/proc/self/task"))
        resource.setrlimit(resource.RLIMIT_NPROC, (now + room, now + room))
        # The kernel counts the threads of a user, and spares root.
        os.setgroups([])
        os.setresuid(*[70_000 + os.getpid()] * 3)


def two_threads(seed: int, folder: str) -> None:
    """Two threads launch programs of one name with calls of one shape, in an order of their own in each process."""
    import threading

    import jax
    import numpy as np
    from jax.sharding import Mesh
    from jax.sharding import PartitionSpec as P

    from jax_ring import ring_psum

    mesh, random = Mesh(np.array(jax.devices()), ("i",)), np.random.default_rng([seed, jax.process_index()])
    wrong, errors, ranks = [], [], mesh.size
    # JAX may run programs without operands in the order of their launches.
    sharding, values = jax.NamedSharding(mesh, P("i")), np.arange(4 * ranks, dtype=np.int32)
    x = jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])

    def program_of(factor):
        def scaled(x):
            return ring_psum(x * factor, "i")

        return jax.jit(jax.shard_map(scaled, mesh=mesh, in_specs=P("i"), out_specs=P()))

    def launch(factor, delays):
        program, want = program_of(factor), values.reshape(ranks, 4).sum(0) * factor
        try:
            for delay in delays:
                time.sleep(delay)
                wrong.append((np.asarray(program(x).addressable_shards[0].data) != want).any())
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            errors.append(" ".join(str(error).split()))

    threads = [threading.Thread(target=launch, args=(i, random.uniform(0, 0.002, 500))) for i in (1, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not any(wrong), f"WRONG BITS in {sum(wrong)} of {len(wrong)} calls"
    print(f"calls {len(wrong)}\n{f'failed: {errors[0]}' if errors else 'done'}", flush=True)
    _await_end(folder)


def _print_error(call) -> None:
    try:
        call()
    except Exception as error:
        print(f"error: {' '.join(str(error).split())}", flush=True)
    else:
        print("right", flush=True)


def _await_end(folder: str) -> None:
    import jax

    while not os.path.exists(pathlib.Path(folder, "last" if jax.process_index() == 0 else "end")):
        time.sleep(0.02)


# ---- Scripts ---------------------------------------------------------------------------------------------------------


def launched_sums(folder: str) -> None:
    """Sums under the launcher, where rank 0 is like any other."""
    import jax

    jax.distributed.initialize()
    run, num_calls = loop_of(jax.devices(), 0), 0
    print(f"pid {os.getpid()}", flush=True)
    try:
        run()
        print("ready", flush=True)
        while run(os.path.exists(pathlib.Path(folder, "end"))):
            num_calls += CALLS
    except jax.errors.JaxRuntimeError as error:
        print(f"failed: {' '.join(str(error).split())}", flush=True)
        raise
    finally:
        print(f"calls {num_calls}", flush=True)


def raising(folder: str, rank: int) -> None:
    """One rank raises an exception in the middle."""
    import jax

    jax.distributed.initialize()
    run = loop_of(jax.devices(), 0)
    for i in range(10**9):
        run()
        if i == 0:
            print("ready", flush=True)
        if i == 3 and jax.process_index() == int(rank):
            pathlib.Path(folder, "raised").touch()
            raise KeyError("the chaos program's own")


def writing(folder: str) -> None:
    """Writes to standard output until it is full."""
    pathlib.Path(folder, f"ready-{os.environ['JAX_PROCESS_ID']}").touch()
    while True:
        print("x" * 1000, flush=True)


def restarted(folder: str, num_failures: int) -> None:
    """Rank `restart` of the first runs ends in the middle, each run at another step; the last run comes to an end."""
    import jax

    jax.distributed.initialize()
    number = int(os.environ.get("JAX_RING_RESTART", "0"))
    run, num_calls = loop_of(jax.devices(), number), 0
    for i in range(8):
        if number < int(num_failures) and i == 2 + number and jax.process_index() == number % jax.process_count():
            pathlib.Path(folder, f"ended-{number}").touch()
            os._exit(7)
        run()
        num_calls += CALLS
    print(f"run {number}\ncalls {num_calls}", flush=True)


def sums_on_hosts(folder: str, coordinator: str, num_processes: str, process: str, devices: str) -> None:
    """Sums in long loops, until an error or the file `end`."""
    import jax

    jax.config.update("jax_num_cpu_devices", int(devices))
    jax.distributed.initialize(coordinator, int(num_processes), int(process))
    import jax_ring  # noqa: F401, before JAX starts its backend

    run, num_calls = loop_of(jax.devices(), 0, calls=CALLS_BETWEEN_HOSTS), 0
    outcome = "done"
    try:
        while run(os.path.exists(pathlib.Path(folder, "enough"))):
            num_calls += CALLS_BETWEEN_HOSTS
            if num_calls == 2 * CALLS_BETWEEN_HOSTS:
                print("ready", flush=True)
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        outcome = f"failed: {' '.join(str(error).split())}"
        time.sleep(1)  # what the error does not say is on standard error
    print(f"calls {num_calls}\n{outcome}", flush=True)
    while not os.path.exists(pathlib.Path(folder, "end")):
        time.sleep(POLL)
    os._exit(0)  # the other hosts may be out of reach


SCRIPTS = {f.__name__: f for f in (launched_sums, raising, writing, restarted, sums_on_hosts)}

if __name__ == "__main__":
    SCRIPTS[sys.argv[1]](*sys.argv[2:])
