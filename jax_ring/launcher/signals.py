"""Signals to the launcher: queued as events, passed on, and what a wait makes of them."""

import asyncio
import errno
import signal
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from jax_ring.launcher import events
from jax_ring.launcher.output import leave_signals_to_main_thread

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# Those that mean what the script makes of them, and do not end the job.
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)

T = TypeVar("T")


class SignalledError(Exception):
    """A signal ends the job."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class Threads(ThreadPoolExecutor):
    """What looks up names. One that the system does not start is an error as of a look-up, which callers expect."""

    def __init__(self) -> None:
        super().__init__(initializer=leave_signals_to_main_thread)

    def submit(self, *arguments: Any, **named: Any) -> Future:
        try:
            return super().submit(*arguments, **named)
        except RuntimeError as error:
            raise BlockingIOError(errno.EAGAIN, str(error)) from error


def receive(end: Callable[[int], None], pass_on: Callable[[int], None], reap: Callable[[], None]) -> None:
    """Has functions called in the event loop: at a signal that ends the job, another one, and the end of a child."""
    loop = asyncio.get_running_loop()
    loop.set_default_executor(Threads())
    # Not asyncio's subprocesses: they end only when their pipes are closed, and descendants may hold the pipes open.
    loop.add_signal_handler(signal.SIGCHLD, reap)
    # The launcher's parent may block these signals, and the job's processes would inherit that.
    handlers = dict.fromkeys(FORWARDED, end) | dict.fromkeys(_PASSED_ON, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD, *handlers})
    for signum, handler in handlers.items():
        # A launcher in the background or under nohup inherits ignored signals, and must keep ignoring them.
        if signal.getsignal(signum) != signal.SIG_IGN:
            loop.add_signal_handler(signum, handler, signum)


async def unless_signalled(
    queue: asyncio.Queue[events.Event], waiting: Coroutine[Any, Any, T], seconds: float | None = None
) -> T:
    """Waits for something. Raises SignalledError if a signal has come, TimeoutError if it takes longer."""
    task, signals = asyncio.create_task(waiting), asyncio.create_task(_next_signal(queue))
    await asyncio.wait({task, signals}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    is_done = task.done()
    task.cancel()
    signals.cancel()
    await asyncio.wait({task, signals})  # the events that it holds are queued again
    if not signals.cancelled():
        raise SignalledError(signals.result())
    if not is_done:
        raise TimeoutError
    return task.result()


async def _next_signal(queue: asyncio.Queue[events.Event]) -> int:
    """Waits for a signal. Other events stay queued."""
    others: list[events.Event] = []
    try:
        while not isinstance(event := await queue.get(), events.Signalled):
            others.append(event)
        return event.signum
    finally:
        # Events may arrive out of order: the launcher that leads may begin before this one knows that it follows.
        others += [queue.get_nowait() for _ in range(queue.qsize())]
        for event in others:
            queue.put_nowait(event)
