"""Times all-reduces between hosts that are network namespaces with a limited link, beside a raw stream over it.

    sudo benchmarks/hosts/namespaces.sh up 2
    sudo env "PATH=$PATH" python benchmarks/hosts/between_hosts.py --hosts 2 --ranks 4 --sizes 64K,4M,16M
    sudo benchmarks/hosts/namespaces.sh down

The raw stream is one TCP connection from each host to the next, in Python, with as many bytes as an all-reduce has to
send at least: 2 (h - 1) / h messages for h hosts, in the type that crosses, which is float32 for smaller floats, or in
8-bit blocks with a scale each. Of 2 Mi smaller floats and more, half of what crosses is rounded. A share of the link is
its time by that of the all-reduce. All take turns in each round; the first two calls of a turn are not counted. Times
are those of process 0.
"""

import argparse
import os
import pathlib
import socket
import subprocess
import sys
import threading
import time

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))  # a program has only its own folder on the path
from harness import options


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    sizes = options.several(options.size)
    parser.add_argument("--hosts", type=options.count, default=2)
    parser.add_argument("--ranks", type=options.count, default=4, help="devices of each host, all of one process")
    parser.add_argument("--sizes", type=sizes, default="4K,64K,1M,4M,16M,64M", help="bytes of a message")
    parser.add_argument("--dtype", type=options.dtype, default="float32", help="of a message")
    parser.add_argument("--wire", default="none,bfloat16,int8", help="of ring sums: none is ring_psum")
    parser.add_argument("--calls", type=options.count, default=5, help="timed calls in each turn")
    parser.add_argument("--rounds", type=options.count, default=3)
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def start(arguments: argparse.Namespace) -> int:
    """Starts a process in each namespace, and returns the exit status of the first one."""
    processes = []
    for i in range(arguments.hosts):
        devices = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(arguments.ranks)}
        variables = {**devices, "JAX_RING_HOST_ID": str(i)}
        command = ["ip", "netns", "exec", f"jax-ring-{i}", sys.executable, *sys.argv, "--process", str(i)]
        out = None if i == 0 else subprocess.DEVNULL
        processes.append(subprocess.Popen(command, env={**os.environ, **variables}, stdout=out))
    try:
        return processes[0].wait()
    finally:
        for process in processes:
            process.kill()


class RawStream:
    """A connection to the next host and one from the previous host, for as many bytes in each direction."""

    def __init__(self, own: int, hosts: int, synchronize):
        with socket.create_server((_address(own), 2345)) as server:
            synchronize()
            self.to_next = socket.create_connection((_address((own + 1) % hosts), 2345))
            self.from_previous, _ = server.accept()

    def exchange(self, data: np.ndarray, into: np.ndarray) -> None:
        """Sends data and receives as much. Both are in memory already, as the operands of the all-reduces are."""
        num_bytes, received = data.nbytes, memoryview(into)
        sender = threading.Thread(target=self.to_next.sendall, args=(data,))
        sender.start()
        done = 0
        while done < num_bytes:
            done += self.from_previous.recv_into(received[done:])
        sender.join()


def _address(host: int) -> str:
    return f"10.77.0.{host + 1}"


def run(arguments: argparse.Namespace) -> None:
    import jax
    from jax.experimental import multihost_utils
    from jax.sharding import AxisType, Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    hosts, process = arguments.hosts, arguments.process
    jax.distributed.initialize(f"{_address(0)}:1234", hosts, process)
    from jax_ring import ring_psum, sync_gradients

    mesh = Mesh(np.array(jax.devices()), ("i",), axis_types=(AxisType.Auto,))
    stream = RawStream(process, hosts, lambda: multihost_utils.sync_global_devices("listening"))
    dtype = jax.numpy.dtype(arguments.dtype)
    reductions = {"lax.psum": lambda x: jax.lax.psum(x, "i")}
    for wire in arguments.wire.split(","):
        if wire == "none":
            reductions["ring_psum"] = lambda x: ring_psum(x, "i")
        else:
            reductions[f"wire {wire}"] = lambda x, wire=wire: sync_gradients(x, "i", wire=wire, mean=False)
    for size in arguments.sizes:
        count = max(size // dtype.itemsize, 1)
        sharding = NamedSharding(mesh, P("i"))
        x = jax.make_array_from_callback((count * mesh.size,), sharding, lambda _, n=count: np.ones(n, dtype))
        calls, raw_of = {}, {}
        for name in reductions:
            each = bytes_crossing(name.removeprefix("wire "), dtype, count)
            raw_of[name] = raw = f"raw stream, {each:.3g} B"
            data, into = np.ones((2, int(each * count * 2 * (hosts - 1) / hosts)), np.uint8)
            calls[raw] = lambda data=data, into=into: stream.exchange(data, into)
        for name, reduce in reductions.items():
            mapped = jax.shard_map(reduce, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False)
            compiled = jax.jit(mapped).lower(x).compile()
            for shard in compiled(x).addressable_shards:
                np.testing.assert_allclose(np.asarray(shard.data, np.float32), mesh.size, rtol=0.02)
            calls[name] = lambda compiled=compiled, x=x: compiled(x).block_until_ready()
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(arguments.rounds):
            for name, call in calls.items():
                for i in range(2 + arguments.calls):
                    begin = time.perf_counter()
                    call()
                    if i >= 2:
                        seconds[name].append(time.perf_counter() - begin)
        if process == 0:
            report(f"{hosts} x {arguments.ranks} {arguments.dtype} {options.size_text(size):>5}", seconds, raw_of)
    multihost_utils.sync_global_devices("done")
    sys.stdout.flush()
    os._exit(0)  # kills the other processes


def bytes_crossing(name: str, dtype: np.dtype, count: int) -> float:
    """Of an element of a message, in each of the two halves of its way between hosts, on average."""
    if name == "int8":
        return 260 / 256
    rounded = {"bfloat16": 2, "float16": 2}.get(name, dtype.itemsize)
    is_exchanged = name != "lax.psum" and rounded < 4 and count >= 2 << 20
    return (4 + rounded) / 2 if is_exchanged else max(4, dtype.itemsize)


def report(title: str, seconds: dict[str, list[float]], raw_of: dict[str, str]) -> None:
    median_of = {name: float(np.median(times)) for name, times in seconds.items()}
    for name, times in seconds.items():
        low, median, high = np.percentile(times, [10, 50, 90]) * 1e3
        line = f"{title} {name:18} {median:8.2f} ms ({low:.2f} to {high:.2f})"
        if raw := raw_of.get(name):
            share, speedup = (median_of[of] / median_of[name] for of in (raw, "lax.psum"))
            line += f", {share:4.0%} of the link, {speedup:.2f}x lax.psum"
        print(line, flush=True)


if __name__ == "__main__":
    arguments = parse_arguments()
    sys.exit(start(arguments) if arguments.process is None else run(arguments))
