"""Scenarios of one host without a launcher: what happens to the processes, and what is expected of the others."""

import contextlib
import errno
import os
import pathlib
import signal
import time
from collections.abc import Iterator

from jobs import first_call, other_call, sums, two_threads
from random_programs import soak
from trial import DEADLINE, HANG, Outcome, Trial, Unexpected

LAYOUTS = ((2, 1), (2, 2), (3, 1), (3, 2), (4, 1))  # (processes, devices of each)


def random_programs(trial: Trial) -> Outcome:
    """Random collectives, groups and types, with random delays: the bits of NumPy."""
    processes, devices = LAYOUTS[trial.random.integers(len(LAYOUTS))]
    with trial.start(soak, processes, devices, arguments=[trial.seed, 60, str(trial.folder)]) as program:
        for process in range(processes):
            trial.await_text(program, process, "done")
        calls = trial.finish(program, range(processes))
    return Outcome("right bits", calls=calls)


def random_programs_and_a_kill(trial: Trial) -> Outcome:
    """Random programs until a process is killed: others get an error that names a process, and no wrong bits before."""
    processes, devices = LAYOUTS[trial.random.integers(len(LAYOUTS))]
    victim = int(trial.random.integers(1, processes))
    with trial.start(soak, processes, devices, arguments=[trial.seed, 10**9, str(trial.folder)]) as program:
        for process in range(processes):
            trial.await_text(program, process, "began")
        time.sleep(trial.random.uniform(0, 3))
        began = time.monotonic()
        program.popen[victim].kill()
        survivors = [i for i in range(processes) if i != victim]
        for process in survivors:
            # A survivor that shares no program with the dead one hears of it by another that does.
            _check_names(trial.await_text(program, process, "failed: "), [victim], survivors)
        seconds = time.monotonic() - began
        calls = trial.finish(program, survivors, has_failed=True)
    return Outcome("error names a process", 1, calls, (seconds,))


def kills(trial: Trial) -> Outcome:
    """Processes are killed one after the other, and the others go on without them.

    Process 0 is spared: without the launcher it hosts JAX's coordinator.
    """
    processes = int(trial.random.integers(3, 5))
    seconds: list[float] = []
    with trial.start(sums, processes, arguments=[trial.seed, str(trial.folder), True]) as program:
        alive = list(range(processes))
        for number in range(1, processes):
            for process in alive:
                trial.await_text(program, process, f"ready {number - 1}")
            time.sleep(trial.random.exponential(0.3))
            victim = int(trial.random.choice(alive[1:]))
            alive.remove(victim)
            began = time.monotonic()
            program.popen[victim].kill()
            for process in alive if len(alive) > 1 or number == 1 else ():
                _await_failures(trial, program, process, number)
                _check_names(program.result(process).stdout.split("failed: ")[-1], [victim], alive)
            if len(alive) == 1:
                _await_failures(trial, program, alive[0], number)
            seconds.append(time.monotonic() - began)
            if len(alive) == 1:
                break
            dead = [i for i in range(processes) if i not in alive]
            _write(trial.folder / f"dead-{number}", " ".join(map(str, dead)))
        calls = trial.finish(program, alive)
    return Outcome("error names it, the others go on", len(seconds), calls, tuple(seconds))


def brief_stops(trial: Trial) -> Outcome:
    """Processes are stopped for less than the deadline, again and again: right bits."""
    processes, devices = LAYOUTS[trial.random.integers(len(LAYOUTS))]
    number = 30
    with trial.start(sums, processes, devices, arguments=[trial.seed, str(trial.folder)]) as program:
        for process in range(processes):
            trial.await_text(program, process, "ready")
        for _ in range(number):
            victim = program.popen[trial.random.integers(processes)]
            victim.send_signal(signal.SIGSTOP)
            time.sleep(trial.random.uniform(0, 0.2))
            victim.send_signal(signal.SIGCONT)
            time.sleep(trial.random.exponential(0.05))
        calls = trial.finish(program, range(processes))
        for process in range(processes):
            assert "failed" not in program.result(process).stdout, program.result(process).stdout
    return Outcome("right bits", number, calls)


def long_stop(trial: Trial) -> Outcome:
    """A process is stopped past the deadline: the others get an error that names it."""
    processes, devices = LAYOUTS[trial.random.integers(len(LAYOUTS))]
    victim = int(trial.random.integers(1, processes))
    with trial.start(sums, processes, devices, arguments=[trial.seed, str(trial.folder)]) as program:
        for process in range(processes):
            trial.await_text(program, process, "ready")
        time.sleep(trial.random.exponential(0.3))
        began = time.monotonic()
        program.popen[victim].send_signal(signal.SIGSTOP)
        others = [i for i in range(processes) if i != victim]
        for process in others:
            _check_names(trial.await_text(program, process, "failed: "), [victim], others)
        seconds = time.monotonic() - began
        program.popen[victim].send_signal(signal.SIGCONT)
        trial.await_text(program, victim, "failed: ")
        calls = trial.finish(program, range(processes))
    return Outcome("error names it", 1, calls, (seconds,))


def slow_rank(trial: Trial) -> Outcome:
    """One process runs a twentieth of the time: right bits."""
    processes, devices = LAYOUTS[trial.random.integers(len(LAYOUTS))]
    with trial.start(sums, processes, devices, arguments=[trial.seed, str(trial.folder)]) as program:
        for process in range(processes):
            trial.await_text(program, process, "ready")
        victim = program.popen[trial.random.integers(processes)]
        until = time.monotonic() + 2
        while time.monotonic() < until:
            victim.send_signal(signal.SIGSTOP)
            time.sleep(0.019)
            victim.send_signal(signal.SIGCONT)
            time.sleep(0.001)
        calls = trial.finish(program, range(processes))
        for process in range(processes):
            assert "failed" not in program.result(process).stdout, program.result(process).stdout
    return Outcome("right bits", 1, calls)


# ---- Other calls, and resources that run out -------------------------------------------------------------------------


def mismatched_calls(trial: Trial) -> Outcome:
    """A process makes another call than the others: all get an error within the deadline that names a process."""
    processes = int(trial.random.integers(2, 5))
    victim = int(trial.random.integers(processes))
    return _all_fail(trial, other_call, processes, [victim], "error names both", "Process ")


def two_threads_of_one_name(trial: Trial) -> Outcome:
    """Two threads of each process launch different programs of one name: right bits.

    XLA runs those of several devices in the order of their launches. Where they wait for each other: an error.
    """
    processes, devices = LAYOUTS[trial.random.integers(len(LAYOUTS))]
    with trial.start(two_threads, processes, devices, arguments=[trial.seed, str(trial.folder)]) as program:
        ends = [trial.await_text(program, process, ("done", "failed: ")) for process in range(processes)]
        calls = trial.finish(program, range(processes), has_failed="done" not in ends)
    if all(end == "done" for end in ends):
        return Outcome("right bits", 1, calls)
    assert devices > 1, ends
    assert all("DEADLINE_EXCEEDED: ring_psum of int32[4]" in end and "Process " in end for end in ends), ends
    return Outcome("error names both", 1, calls)


def thread_limit(trial: Trial) -> Outcome:
    """A limit of processes, as of a container."""
    if os.geteuid() != 0:
        return Outcome("not tried: needs root")
    return _limited(trial, "threads", int(trial.random.integers(2)))


def file_limit(trial: Trial) -> Outcome:
    """No more files can be opened than a few."""
    return _limited(trial, "files", int(trial.random.integers(4)))


def memory_limit(trial: Trial) -> Outcome:
    """Little more address space can be mapped."""
    return _limited(trial, "memory", int(trial.random.choice([0, 1, 8, 64])))


def _limited(trial: Trial, what: str, room: int) -> Outcome:
    """An error in the first call, no hang in the second; the others hear."""
    processes = int(trial.random.integers(2, 4))
    trial.folder.chmod(0o777)
    with trial.start(first_call, processes, 2, arguments=[str(trial.folder), what, room]) as program:
        began = time.monotonic()
        for process in range(processes):
            trial.await_text(program, process, "went on")
        seconds = time.monotonic() - began
        texts = [program.result(i).stdout for i in range(processes)]
        trial.finish(program, range(processes))
    failed = [text for text in texts if "error: " in text]
    for text in failed:
        assert "ring_psum of float32" in text or "jax_ring" in text or "Process " in text, text
    ended = "error of jax_ring, no hang" if failed else f"right bits: there was room for the {what}"
    return Outcome(ended, 1, 0, (seconds,) if failed else ())


def full_shared_memory(trial: Trial) -> Outcome:
    """/dev/shm is full: an error in every process that says so. Needs a /dev/shm of its own (`--private`)."""
    if os.environ.get("JAX_RING_CHAOS_PRIVATE") != "1":
        return Outcome("not tried: /dev/shm is not the program's own")
    processes = int(trial.random.integers(2, 5))
    with _filled("/dev/shm", leave=int(trial.random.choice([0, 4096, 65536]))):
        return _all_fail(
            trial, first_call, processes, ["nothing", 0], "error says so in all", "/dev/shm", or_right="went on",
            seconds=HANG,
        )  # fmt: skip


@contextlib.contextmanager
def _filled(folder: str, leave: int) -> Iterator[None]:
    """Fills a file system until so many bytes are free."""
    path = pathlib.Path(folder, "filled-by-chaos")
    try:
        with open(path, "wb", buffering=0) as file:
            free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize - leave
            try:
                os.posix_fallocate(file.fileno(), 0, max(free, 1))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
        yield
    finally:
        path.unlink(missing_ok=True)


# ---- Parts of scenarios ----------------------------------------------------------------------------------------------


def _all_fail(
    trial: Trial, body, processes: int, arguments: list, ended: str, text: str, or_right="", seconds=2 * DEADLINE
) -> Outcome:
    """All processes get an error with this text, in so many seconds and some slack."""
    with trial.start(body, processes, arguments=[str(trial.folder), *arguments]) as program:
        began = time.monotonic()
        if or_right:
            for process in range(processes):
                trial.await_text(program, process, or_right)
            if all("error: " not in program.result(i).stdout for i in range(processes)):
                trial.finish(program, range(processes))
                return Outcome("right bits: there was room enough", 1)
        for process in range(processes):
            error = trial.await_text(program, process, "error: ")
            assert text in error, f"process {process} has no {text!r}: {error}"
        took = time.monotonic() - began
        trial.finish(program, range(processes))
    if took > seconds + HANG:
        raise Unexpected("hang", f"the errors came after {took:.0f} s")
    return Outcome(ended, 1, 0, (took,))


def _await_failures(trial: Trial, program, process: int, number: int) -> None:
    until = time.monotonic() + HANG
    while program.result(process).stdout.count("failed: ") < number:
        if program.popen[process].poll() is not None:
            raise Unexpected("other end", f"process {process} ended\n{program.result(process)}")
        if time.monotonic() > until:
            raise Unexpected("hang", f"process {process} has no error {number}\n{program.result(process)}")
        time.sleep(0.02)


def _check_names(error: str, victims: list[int], others: list[int]) -> None:
    """An error names the process that failed, or another one that did and has aborted the group for it."""
    blamed = ("Process {} ", "process {}, the group's first, did not")
    named = [i for i in (*victims, *others) if any(text.format(i) in error for text in blamed)]
    assert named, f"the error names no process: {error}"


def _write(path: pathlib.Path, text: str) -> None:
    """Writes a file that nobody sees half written."""
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(text)
    temporary.rename(path)


SCENARIOS = (
    random_programs,
    random_programs_and_a_kill,
    kills,
    brief_stops,
    long_stop,
    slow_rank,
    mismatched_calls,
    two_threads_of_one_name,
    thread_limit,
    file_limit,
    memory_limit,
    full_shared_memory,
)
