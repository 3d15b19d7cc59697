"""Labeled output lines, by threads, so that a blocked reader blocks nothing else; and files that have them, too."""

import asyncio
import contextlib
import errno
import itertools
import os
import pathlib
import queue
import re
import select
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from typing import IO, TextIO

from jax_ring.launcher.coordinator.folder import trusted_users
from jax_ring.launcher.schema import escaped

_COLORS = (36, 33, 32, 35, 34, 31)
# Above this queue length a writer takes no more from the processes; they then block in their own writes.
_QUEUE_BYTES = 1 << 20
# After a pause of this length, a progress bar's last state is shown.
_PAUSE_SECONDS = 0.1
# How long to wait for the end of a pipe. A descendant outside the process group may hold it open.
_IDLE_SECONDS = 1.0
# A longer line is passed on in pieces of this size, so that it does not stay in memory as a whole.
_LINE_BYTES = 1 << 20
_ERASE_REST = b"\x1b[K"  # rest of the terminal's line: a longer state of a progress bar may have been there
# A \r at the end of the data may be the first half of \r\n.
_LINE_END = re.compile(rb"\r\n|\n|\r(?!\Z)")


def leave_signals_to_main_thread() -> None:
    """For other threads: one that is preempted before it has noted a signal lets the launcher see later ones first."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())


class Writer:
    """A thread that writes to files that may block; the process's exit does not wait for it.

    Everything except `_run` is called in the event loop's thread.

    Attributes:
      room: set while the queue is short.
      empty: set while all is written.
    """

    def __init__(self, name: str, on_error: Callable[[int, OSError], None]) -> None:
        """on_error: called in the event loop with a file and the reason; later output is dropped."""
        self._loop = asyncio.get_running_loop()
        self._on_error = on_error
        # A file descriptor, and data; None closes it.
        self._queue: queue.SimpleQueue[tuple[int, bytes | None]] = queue.SimpleQueue()
        self._queued = 0  # bytes, including those being written
        self.room, self.empty = asyncio.Event(), asyncio.Event()
        self.room.set()
        self.empty.set()
        try:
            threading.Thread(target=self._run, name=name, daemon=True).start()
        except RuntimeError as error:  # Python does not keep the system's
            raise BlockingIOError(errno.EAGAIN, str(error)) from error

    def put(self, file: int, data: bytes) -> None:
        """Queues data without blocking."""
        self._queue.put((file, data))
        self._queued += len(data)
        self.empty.clear()
        if self._queued > _QUEUE_BYTES:
            self.room.clear()

    def close(self, file: int) -> None:
        """Closes a file when what is queued for it has been written."""
        self._queue.put((file, None))

    def _run(self) -> None:
        leave_signals_to_main_thread()
        broken: set[int] = set()
        while True:
            file, data = self._queue.get()
            if data is None:
                broken.discard(file)
                os.close(file)
                continue
            if file not in broken:
                try:
                    _write_all(file, data)
                except OSError as error:
                    broken.add(file)
                    self._call(self._on_error, file, error)
            self._call(self._written, len(data))

    def _written(self, size: int) -> None:
        self._queued -= size
        if self._queued <= _QUEUE_BYTES // 2:
            self.room.set()
        if not self._queued:
            self.empty.set()

    def _call(self, function: Callable, *arguments) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended; nobody waits
            self._loop.call_soon_threadsafe(function, *arguments)


def _write_all(file: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        try:
            left = left[os.write(file, left) :]
        except BlockingIOError:  # another program has made the file non-blocking
            select.select([], [file], [])


class Lines:
    """Cuts a stream of bytes into lines, and into states of progress bars, which end with \\r or a pause."""

    def __init__(self) -> None:
        self._partial = bytearray()
        self._shown = b""  # the last state since the last newline
        self._is_bar = False  # whether a \r came since the last newline

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Adds data; yields (text, end) of what is complete, where `end` is a newline, or \\r for a state."""
        held = self._partial.endswith(b"\r")
        if not held and b"\n" not in data and b"\r" not in data:
            self._partial += data
            yield from self._cut()
            return
        searched = len(self._partial) - held
        text, start = bytes(self._partial) + data, 0
        for match in _LINE_END.finditer(text, searched):
            piece, start = text[start : match.start()], match.end()
            if match.group() == b"\r":
                self._is_bar = True
                yield from self._state(piece)
            else:
                yield piece or self._shown, b"\n"  # a newline alone leaves the bar's last state visible
                self._shown, self._is_bar = b"", False
        self._partial = bytearray(text[start:])
        yield from self._cut()

    def _cut(self) -> Iterator[tuple[bytes, bytes]]:
        # Something is left, so that no empty line follows the last piece.
        while len(self._partial) > _LINE_BYTES:
            yield bytes(self._partial[:_LINE_BYTES]), b"\n"
            del self._partial[:_LINE_BYTES]

    def is_waiting(self) -> bool:
        """Whether `pause` has a state."""
        is_bar = self._is_bar or self._partial.endswith(b"\r")
        return is_bar and bytes(self._partial.removesuffix(b"\r")) not in (b"", self._shown)

    def pause(self) -> Iterator[tuple[bytes, bytes]]:
        """Yields the state that a progress bar has after its last \\r, when no more data comes for a while."""
        yield from self._state(bytes(self._partial.removesuffix(b"\r")))

    def end(self) -> Iterator[tuple[bytes, bytes]]:
        if last := bytes(self._partial.removesuffix(b"\r")) or self._shown:
            yield last, b"\n"

    def _state(self, piece: bytes) -> Iterator[tuple[bytes, bytes]]:
        if piece and piece != self._shown:
            self._shown = piece
            yield piece, b"\r"


class Output:
    """Where processes and launcher write.

    on_closed: called when standard output or standard error has lost its reader.

    Attributes:
      is_lost: whether some of either could not be written.
    """

    def __init__(self, stdout: TextIO | None, stderr: TextIO | None, on_closed: Callable[[], None]) -> None:
        self._on_closed = on_closed
        self.is_lost = False
        self._copying: set[asyncio.Task] = set()
        self._files = [stream.fileno() if stream else os.open(os.devnull, os.O_WRONLY) for stream in (stdout, stderr)]
        self._is_terminal = [os.isatty(file) for file in self._files]
        self._logs = Writer("log files", self._failed)
        self._writers = [Writer("standard output", self._failed)]
        # Two threads writing to one pipe would mix their lines.
        is_same = os.path.sameopenfile(*self._files)
        self._writers.append(self._writers[0] if is_same else Writer("standard error", self._failed))

    def log(self, *lines: str) -> None:
        """Writes a message without blocking; what is in it may be of others."""
        text = "\n".join(map(escaped, lines))
        self._writers[1].put(self._files[1], f"jax_ring.launch: {text}\n".encode())

    def copy(self, stream: IO[bytes] | None, to_stderr: bool, label: str, color: int, log: int | None = None) -> None:
        """Begins to copy lines from a pipe, labeled; `log` is a file without labels, which it closes."""
        assert stream is not None
        task = asyncio.create_task(self._copy(stream, to_stderr, label, color, log))
        self._copying.add(task)
        task.add_done_callback(self._copying.discard)

    async def _copy(self, stream: IO[bytes], to_stderr: bool, label: str, color: int, log: int | None) -> None:
        out, writer = self._files[to_stderr], self._writers[to_stderr]
        prefix, erase = f"{label} ".encode(), b""
        if self._is_terminal[to_stderr]:
            erase = _ERASE_REST
            if not os.environ.get("NO_COLOR"):
                prefix = f"\x1b[{_COLORS[color % len(_COLORS)]}m{label}\x1b[0m ".encode()
        reader, lines = asyncio.StreamReader(), Lines()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), stream
        )

        def show(pieces: Iterator[tuple[bytes, bytes]]) -> None:
            if text := b"".join(prefix + piece + erase + end for piece, end in pieces):
                writer.put(out, text)

        try:
            while True:
                try:
                    async with asyncio.timeout(_PAUSE_SECONDS if lines.is_waiting() else None):
                        chunk = await reader.read(1 << 16)
                except TimeoutError:
                    show(lines.pause())
                    continue
                if not chunk:
                    break
                show(lines.feed(chunk))
                if log is not None:
                    self._logs.put(log, chunk)
                    await self._logs.room.wait()
                await writer.room.wait()
        finally:
            show(lines.end())
            transport.close()
            if log is not None:
                self._logs.close(log)

    async def written(self) -> None:
        """Waits for the ends of all pipes, and until what they brought is written, as all that was logged."""
        writers = {*self._writers, self._logs}
        while copying := [*self._copying]:
            _, left = await asyncio.wait(copying, timeout=_IDLE_SECONDS)
            if left and all(writer.empty.is_set() for writer in writers):
                for task in left:  # a descendant holds a pipe open, but writes nothing
                    task.cancel()
        for writer in writers:
            await writer.empty.wait()

    def _failed(self, file: int, error: OSError) -> None:
        self.is_lost |= file in self._files
        if isinstance(error, BrokenPipeError) and file in self._files:
            # A program without a launcher would die of SIGPIPE.
            self._on_closed()
        elif file != self._files[1]:
            name = {self._files[0]: "standard output"}.get(file, "a log file")
            self.log(f"cannot write to {name}: {error}. The rest of its output is lost")


class LogFiles:
    """The files of --log-dir: FOLDER/rank-2.out and .err, and FOLDER/restart-1 for the first restart.

    A later job with the same folder has FOLDER/job-2, and so on. Launchers of several hosts may share it. Where other
    users may write, none of them decides where the output goes.

    log: tells the user where the output is, if it is not in the folder itself.
    """

    def __init__(self, parent: pathlib.Path | None, log: Callable[[str], None]) -> None:
        self._parent, self._log = parent, log
        self._folder: pathlib.Path | None = None  # of the job, once it is known

    def of(self, job: str, restart: int, rank: int) -> tuple[int | None, int | None]:
        """Descriptors for a rank's standard output and error.

        job: a text that the launchers of all its hosts know, and of no other job.
        """
        if self._parent is None:
            return None, None
        try:
            if self._folder is None:
                numbered = (self._parent / f"job-{number}" for number in itertools.count(2))
                self._folder = next(each for each in itertools.chain([self._parent], numbered) if _is_of(each, job))
                if self._folder != self._parent:
                    self._log(f"the output of this job is in {self._folder}: {self._parent} has that of an earlier one")
            folder = _made(self._folder / f"restart-{restart}") if restart else self._folder
            out = _opened(folder / f"rank-{rank}.out")
            try:
                return out, _opened(folder / f"rank-{rank}.err")
            except OSError:
                os.close(out)
                raise
        except OSError as error:
            raise OSError(f"cannot write to --log-dir: {error}") from error


def _is_of(folder: pathlib.Path, job: str) -> bool:
    """Whether a folder is a job's, which takes one that has no output."""
    owner = _made(folder) / ".job"  # a link, made as a whole, whose target is no file but the job's name
    # In this order: another launcher of the job takes the folder before it writes.
    if (any(folder.glob("rank-*")) or any(folder.glob("restart-*"))) and not owner.is_symlink():
        return False  # by a job that has left no name
    with contextlib.suppress(FileExistsError):
        owner.symlink_to(job)
    return os.readlink(owner) == job


def _made(folder: pathlib.Path) -> pathlib.Path:
    """A folder, which need not be there. Raises PermissionError if another user may decide what is in it."""
    folder.mkdir(parents=True, exist_ok=True)
    found = folder.stat()
    if not {found.st_uid, folder.lstat().st_uid} <= trusted_users(folder):
        raise PermissionError(f"{folder} is of another user, who may replace what is in it: take one of your own")
    if found.st_uid != os.geteuid() and found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        raise PermissionError(f"all users may replace what is in {folder}: take a folder of your own")
    return folder


def _opened(path: pathlib.Path) -> int:
    """A file to write to at its end. Raises PermissionError if it is of another user, a link, or no file."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe would wait for a reader
    with contextlib.suppress(FileExistsError):
        return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
    if path.is_symlink():
        raise PermissionError(f"{path} is a link")
    file = os.open(path, flags)  # what is there is of this job
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        os.close(file)
        raise PermissionError(f"{path} is of another user, or no file")
    return file
