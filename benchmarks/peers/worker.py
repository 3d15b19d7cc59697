"""One process of a library, which `peer.Peer` starts: it times the calls that it is asked for."""

import os
import pathlib
import sys
import time
from multiprocessing.connection import Client

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))  # a program has only its own folder on the path

from harness.measure import count_wrong, rank_values

from peers.libraries import BETWEEN_PROCESSES, Calls, Layout
from peers.peer import Measurement, Task


def measure(calls: Calls, task: Task) -> tuple[list[np.ndarray], int]:
    """Seconds of each call out of place, in place and within a loop, and the number of calls made."""

    def seconds(run) -> float:
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin

    out_of_place, in_place, in_loop, empty = [], [], [], []
    for i in range(task.warmup + task.iterations):
        plain = seconds(calls.out_of_place)
        calls.before_in_place()
        donated = seconds(calls.in_place)
        if i >= task.warmup:
            out_of_place.append(plain)
            in_place.append(donated)
    loops = 1 + max(3, task.iterations // 4) if task.times else 0
    for i in range(loops):
        looped, empty_looped = seconds(calls.loop), seconds(calls.empty_loop)
        if i >= 1:
            in_loop.append(looped / calls.times)
            empty.append(empty_looped / calls.times)
    in_loop = np.array(in_loop) - np.median(empty or 0)
    return [np.array(out_of_place), np.array(in_place), in_loop], 2 * (
        task.warmup + task.iterations
    ) + loops * calls.times


def serve(name: str, folder: str, processes: str, devices: str, hosts: str, *rest: str) -> None:
    layout = Layout(int(processes), int(devices), int(hosts))
    library = BETWEEN_PROCESSES[name](folder, layout, *rest)
    message = None
    with Client(os.path.join(folder, "socket")) as connection:
        while (task := connection.recv()) is not None:
            try:
                # With interleaved libraries, one message is measured repeatedly.
                if message != (task.count, task.dtype, task.times):
                    message = calls = None
                    values = rank_values(layout.ranks, task.count, task.dtype)
                    own = values[library.process * layout.devices :][: layout.devices]
                    calls = library.calls(own, task.times)
                    wrong = count_wrong(values, calls.results)
                    message = (task.count, task.dtype, task.times)
                    del values, own
                seconds, num_calls = measure(calls, task)
                connection.send(Measurement(seconds, wrong, num_calls, calls.served_by, calls.xla_bytes))
            except Exception as error:
                connection.send(error)


if __name__ == "__main__":
    serve(*sys.argv[1:])
