"""`python -m jax_ring.launch -n 4 script.py`: runs a script as several processes of `jax.distributed` on this host.

In the script, `jax.distributed.initialize()` needs no arguments. Every line that a process writes comes out with its
rank before it. When a process fails, the others are ended, and its status becomes that of the launcher. SIGINT, SIGTERM
and SIGHUP are passed on. Who does not end within the grace period is killed. Processes read nothing from the terminal.
"""

import argparse
import asyncio
import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, TextIO

GRACE_SECONDS = 10.0
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_COLOURS = (36, 33, 32, 35, 34, 31)
_LAST_OUTPUT_SECONDS = 1.0  # of what a process started and moved out of our reach, which may keep its pipe open


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line, and returns the exit status."""
    options = _parse(arguments)
    with reserved_port() as port:
        environments = [
            os.environ | environment(rank, options.processes, port, options.devices)
            for rank in range(options.processes)
        ]
        return asyncio.run(Launch([options.script, *options.arguments], environments, options.grace).run())


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m jax_ring.launch", description=(__doc__ or "").partition("\n\n")[2], allow_abbrev=False
    )
    parser.add_argument("-n", "--processes", type=int, required=True, help="how many processes")
    parser.add_argument(
        "--devices", type=int, help="devices of each process: so many CPU devices, or GPUs of its own (default: 1)"
    )
    parser.add_argument(
        "--grace", type=float, default=GRACE_SECONDS, metavar="SECONDS",
        help="from the request to end until processes are killed (default: %(default)g)",
    )  # fmt: skip
    parser.add_argument("script", help="a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the script is given")
    options = parser.parse_args(arguments)
    if options.processes < 1:
        parser.error(f"-n must be at least 1, got {options.processes}")
    if options.devices is not None and options.devices < 1:
        parser.error(f"--devices must be at least 1, got {options.devices}")
    if not options.grace >= 0:
        parser.error(f"--grace must be a number of seconds, got {options.grace}")
    if not pathlib.Path(options.script).is_file():
        parser.error(f"there is no file {options.script!r} in {os.getcwd()}; options of the launcher come before it")
    return options


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A TCP port of this host that nobody else is given, but on which the coordinator can listen."""
    with socket.socket() as holder:
        # The coordinator's socket has this option too: bound here without listening, the port is still free for it.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def environment(rank: int, processes: int, port: int, devices: int | None) -> dict[str, str]:
    """What process `rank` of so many finds in its environment, besides what the launcher has there itself."""
    result = {
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_COORDINATOR_BIND_ADDRESS": f"127.0.0.1:{port}",  # else it would listen to other hosts as well
        "JAX_NUM_PROCESSES": str(processes),
        "JAX_PROCESS_ID": str(rank),
    }
    if devices is not None or "JAX_LOCAL_DEVICE_IDS" not in os.environ:
        count = devices or 1
        result["JAX_LOCAL_DEVICE_IDS"] = ",".join(str(rank * count + i) for i in range(count))
    if devices is not None:
        result["JAX_NUM_CPU_DEVICES"] = str(devices)
    return result


class Launch:
    """The processes of one run, each the leader of a process group, so that what it starts itself ends with it.

    command: the script and its arguments. environments: one for each process.
    """

    def __init__(self, command: Sequence[str], environments: Sequence[dict[str, str]], grace: float):
        self.command, self.environments, self.grace = command, environments, grace
        self.processes: list[subprocess.Popen] = []  # by rank
        self.running: set[int] = set()  # ranks of whose end has not been heard
        # Rank and status of a process that ended, or None and the number of a signal to the launcher.
        self.events: asyncio.Queue[tuple[int | None, int]] = asyncio.Queue()

    async def run(self) -> int:
        """Starts the processes, sees to it that they end, and returns the exit status."""
        relays: list[asyncio.Task] = []
        self._receive_signals()
        program = [sys.executable, "-P", str(pathlib.Path(__file__).with_name("launched.py")), str(os.getpid())]
        try:
            for rank, env in enumerate(self.environments):
                process = subprocess.Popen(
                    [*program, *self.command], env=env, process_group=0,
                    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                )  # fmt: skip
                self.processes.append(process)
                self.running.add(rank)
                for stream, out in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                    assert stream is not None
                    relays.append(asyncio.create_task(self._relay(stream, out, rank)))
            return await self._supervise()
        finally:
            self._send(signal.SIGKILL, self.running)
            for process in self.processes:
                process.wait()
            if relays:
                await asyncio.wait(relays, timeout=_LAST_OUTPUT_SECONDS)

    async def _supervise(self) -> int:
        while self.running:
            rank, status = await self.events.get()
            if rank is None:
                # Python ignores SIGPIPE.
                passed_on = signal.SIGTERM if status == signal.SIGPIPE else status
                return await self._end(passed_on, 128 + status, f"received {signal.Signals(status).name}")
            self.running.remove(rank)
            name = f"rank {rank} (pid {self.processes[rank].pid})"
            if status > 0:
                return await self._end(signal.SIGTERM, status, f"{name} ended with status {status}")
            if status < 0:
                how = signal.Signals(-status).name
                return await self._end(signal.SIGTERM, 128 - status, f"{name} was killed by {how}")
        return 0

    async def _end(self, signum: int, result: int, why: str) -> int:
        """Asks the processes that run to end, has those killed that do not within the grace period: the exit status."""
        if self.running:
            why += f"; ending {_listed(self.running)} by {signal.Signals(signum).name}"
        _say(why)
        self._send(signum, self.running)
        try:
            async with asyncio.timeout(self.grace):
                while self.running:
                    rank, _ = await self.events.get()
                    if rank is None:  # a second signal: whoever sends it does not want to wait
                        break
                    self.running.remove(rank)
        except TimeoutError:
            pass
        if self.running:
            _say(f"killing {_listed(self.running)}")
        return result

    def _receive_signals(self) -> None:
        loop = asyncio.get_running_loop()
        # Not asyncio's processes: they end when their output has ended, which others may hold open.
        loop.add_signal_handler(signal.SIGCHLD, self._hear_of_ends)
        for signum in PASSED_ON:
            # Whoever started the launcher in the background, or under nohup, has it ignore some.
            if signal.getsignal(signum) != signal.SIG_IGN:
                loop.add_signal_handler(signum, self.events.put_nowait, (None, signum))

    def _hear_of_ends(self) -> None:
        for rank, process in enumerate(self.processes):
            if process.returncode is None and (status := process.poll()) is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # what it has left behind
                self.events.put_nowait((rank, status))

    def _send(self, signum: int, ranks: Iterable[int]) -> None:
        for rank in ranks:
            if self.processes[rank].returncode is None:
                os.killpg(self.processes[rank].pid, signum)

    async def _relay(self, stream: IO[bytes], out: TextIO, rank: int) -> None:
        label = f"[{rank}]".rjust(len(f"[{len(self.environments) - 1}]"))
        if out.isatty() and not os.environ.get("NO_COLOR"):
            label = f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{label}\x1b[0m"
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), stream
        )
        try:
            await _copy_lines(reader, out.buffer, f"{label} ".encode())
        except BrokenPipeError:
            # Whoever read our output has gone: the end that a program without a launcher would meet.
            os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
            self.events.put_nowait((None, signal.SIGPIPE))
        finally:
            transport.close()


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))


def _say(text: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        print(f"jax_ring.launch: {text}", file=sys.stderr, flush=True)


async def _copy_lines(stream: asyncio.StreamReader, out: IO[bytes], prefix: bytes) -> None:
    """Copies whole lines, so that those of different processes do not mix, and at the end what is left of one."""

    def write(text: bytes) -> None:
        out.write(b"".join(prefix + line + b"\n" for line in text.split(b"\n")))
        out.flush()

    begun = bytearray()
    while chunk := await stream.read(1 << 16):
        whole, newline, rest = chunk.rpartition(b"\n")
        if newline:
            write(bytes(begun) + whole)
            begun.clear()
        begun += rest
    if begun:
        write(bytes(begun))
