"""`python -m jax_ring.launch -n 4 script.py`: Runs a script as several processes of `jax.distributed` on this host.

In the script, `jax.distributed.initialize()` needs no arguments. Each line of output is prefixed with the rank of its
process. When a process fails, the launcher terminates the others and exits with the status of the failed one. It
forwards SIGINT, SIGTERM and SIGHUP, and kills processes that are still running after the grace period. The standard
input of the processes is empty.
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
FORWARDED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_COLORS = (36, 33, 32, 35, 34, 31)
# How long to wait for the end of the output. A descendant outside the process group may hold a pipe open.
_DRAIN_SECONDS = 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status."""
    options = _parse(arguments)
    with reserved_port() as port:
        environments = [
            os.environ | environment(rank, options.processes, port, options.devices)
            for rank in range(options.processes)
        ]
        return asyncio.run(Launch([options.script, *options.arguments], environments, options.grace).run())


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m jax_ring.launch", description=(__doc__ or "").partition(": ")[2], allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("-n", "--processes", type=int, required=True, help="number of processes")
    parser.add_argument(
        "--devices", type=int, help="devices per process: CPU devices, or GPUs that no other process uses (default: 1)"
    )
    parser.add_argument(
        "--grace", type=float, default=GRACE_SECONDS, metavar="SECONDS",
        help="time that processes have to exit before they are killed (default: %(default)g)",
    )  # fmt: skip
    parser.add_argument("script", help="a Python file")
    rest = parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    rest.required = False  # argparse would list them among those that are missing
    options = parser.parse_args(arguments)
    if options.processes < 1:
        parser.error(f"-n must be at least 1, got {options.processes}")
    if options.devices is not None and options.devices < 1:
        parser.error(f"--devices must be at least 1, got {options.devices}")
    if not options.grace >= 0:
        parser.error(f"--grace must be a number of seconds, got {options.grace}")
    if not pathlib.Path(options.script).is_file():
        parser.error(
            f"there is no file {options.script!r} in {os.getcwd()}; options of the launcher go before the script"
        )
    return options


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A TCP port of this host that no other program gets, but on which the coordinator can listen."""
    with socket.socket() as holder:
        # The coordinator's socket has this option too: bound here without listening, the port is still free for it.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def environment(rank: int, processes: int, port: int, devices: int | None) -> dict[str, str]:
    """The environment variables that process `rank` gets in addition to those of the launcher."""
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
    """The processes of one run. Each leads a process group, so that its descendants can be killed with it.

    command: the script and its arguments. environments: one per process.
    """

    def __init__(self, command: Sequence[str], environments: Sequence[dict[str, str]], grace: float):
        self.command, self.environments, self.grace = command, environments, grace
        self.processes: list[subprocess.Popen] = []  # by rank
        self.running: set[int] = set()  # ranks that have not been reaped
        # (rank, exit status) of a process that exited, or (None, number) of a signal that the launcher received.
        self.events: asyncio.Queue[tuple[int | None, int]] = asyncio.Queue()

    async def run(self) -> int:
        """Starts the processes, waits until all have exited, and returns the exit status."""
        forwarders: list[asyncio.Task] = []
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
                    forwarders.append(asyncio.create_task(self._forward_output(stream, out, rank)))
            return await self._supervise()
        finally:
            self._send(signal.SIGKILL, self.running)
            for process in self.processes:
                process.wait()
            if forwarders:
                await asyncio.wait(forwarders, timeout=_DRAIN_SECONDS)

    async def _supervise(self) -> int:
        while self.running:
            rank, status = await self.events.get()
            if rank is None:
                # Python ignores SIGPIPE, so forwarding it would have no effect.
                forwarded = signal.SIGTERM if status == signal.SIGPIPE else status
                return await self._terminate(forwarded, 128 + status, f"received {signal.Signals(status).name}")
            self.running.remove(rank)
            name = f"rank {rank} (pid {self.processes[rank].pid})"
            if status > 0:
                return await self._terminate(signal.SIGTERM, status, f"{name} exited with status {status}")
            if status < 0:
                killer = signal.Signals(-status).name
                return await self._terminate(signal.SIGTERM, 128 - status, f"{name} was killed by {killer}")
        return 0

    async def _terminate(self, signum: int, exit_status: int, reason: str) -> int:
        """Sends a signal to the running processes, waits for the grace period, and returns the exit status.

        `run` kills the processes that are left.
        """
        if self.running:
            reason += f"; sending {signal.Signals(signum).name} to ranks {_format_ranks(self.running)}"
        _log(reason)
        self._send(signum, self.running)
        try:
            async with asyncio.timeout(self.grace):
                while self.running:
                    rank, _ = await self.events.get()
                    if rank is None:  # a second signal ends the grace period
                        break
                    self.running.remove(rank)
        except TimeoutError:
            pass
        if self.running:
            _log(f"killing ranks {_format_ranks(self.running)}")
        return exit_status

    def _receive_signals(self) -> None:
        loop = asyncio.get_running_loop()
        # Not asyncio's subprocesses: those end only when their pipes are closed, and descendants may hold them open.
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        for signum in FORWARDED_SIGNALS:
            # A launcher in the background or under nohup inherits ignored signals, and must keep ignoring them.
            if signal.getsignal(signum) != signal.SIG_IGN:
                loop.add_signal_handler(signum, self.events.put_nowait, (None, signum))

    def _reap(self) -> None:
        for rank, process in enumerate(self.processes):
            if process.returncode is None and (status := process.poll()) is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # its descendants
                self.events.put_nowait((rank, status))

    def _send(self, signum: int, ranks: Iterable[int]) -> None:
        for rank in ranks:
            if self.processes[rank].returncode is None:
                os.killpg(self.processes[rank].pid, signum)

    async def _forward_output(self, stream: IO[bytes], out: TextIO, rank: int) -> None:
        label = f"[{rank}]".rjust(len(f"[{len(self.environments) - 1}]"))
        if out.isatty() and not os.environ.get("NO_COLOR"):
            label = f"\x1b[{_COLORS[rank % len(_COLORS)]}m{label}\x1b[0m"
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), stream
        )
        try:
            await _copy_lines(reader, out.buffer, f"{label} ".encode())
        except BrokenPipeError:
            # The reader of our output has exited. A program without a launcher would die of SIGPIPE.
            os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
            self.events.put_nowait((None, signal.SIGPIPE))
        finally:
            transport.close()


def _format_ranks(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))


def _log(text: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        print(f"jax_ring.launch: {text}", file=sys.stderr, flush=True)


async def _copy_lines(stream: asyncio.StreamReader, out: IO[bytes], prefix: bytes) -> None:
    """Copies whole lines, so that lines of different processes do not mix; at the end, also an unfinished line."""

    def write(text: bytes) -> None:
        out.write(b"".join(prefix + line + b"\n" for line in text.split(b"\n")))
        out.flush()

    partial = bytearray()
    while chunk := await stream.read(1 << 16):
        whole, newline, rest = chunk.rpartition(b"\n")
        if newline:
            write(bytes(partial) + whole)
            partial.clear()
        partial += rest
    if partial:
        write(bytes(partial))
