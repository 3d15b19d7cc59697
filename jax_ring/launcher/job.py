"""A job on one host: attempts, as long as restarts are left."""

import asyncio
import itertools
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from jax_ring.launcher import environment, events
from jax_ring.launcher.arguments import Options
from jax_ring.launcher.attempt import Attempt
from jax_ring.launcher.control_server import ControlServer
from jax_ring.launcher.coordinator.process import Service
from jax_ring.launcher.environment import Plan
from jax_ring.launcher.events import Failure
from jax_ring.launcher.output import Output, leave_signals_to_main_thread
from jax_ring.launcher.shared import Outcome, Remote, Shared, stopped_by

FORWARDED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# Those that mean what the script makes of them, and do not end the job.
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
_OUTPUT_LOST = 120  # Python's exit status where all else went well
# How long to wait for the end of the output. A descendant outside the process group may hold a pipe open.
_DRAIN_SECONDS = 1.0


T = TypeVar("T")


class SignalledError(Exception):
    """A signal ends the job."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class Job(Shared):
    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._attempt: Attempt | None = None

    async def run(self) -> int:
        """Returns the launcher's exit status."""
        self.output = Output(sys.stdout, sys.stderr, lambda: self._signalled(signal.SIGPIPE))
        self.server = ControlServer(lambda *question: self.queue.put_nowait(events.Asked(*question)))
        self.kept = environment.kept_files(self.options.processes)
        self._receive_signals()
        await self.server.start()
        try:
            outcome = await self._attempts()
        except SignalledError as error:
            outcome = stopped_by(error.signum)
        finally:
            self.server.close()
            for file in self.kept:
                os.close(file)
        status = await self._drained(outcome)
        # Nothing follows the last line. A signal is noted in a pipe that asyncio closes first, of which Python would
        # complain, and Python 3.11 would report each connection that is still open.
        signal.set_wakeup_fd(-1)
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        return status

    async def _attempts(self) -> Outcome:
        slots = tuple(range(self.options.processes))
        blamed = None  # the slot whose process failed last
        for restart in itertools.count():
            outcome = await self._try(restart, slots)
            failure = outcome.failure
            if outcome.status == 0 or outcome.is_stopped or outcome.is_ended:
                break
            if not self.take_restart():
                self.output.log(f"failed: {failure}")
                break
            slot = None if failure is None else dict(enumerate(slots)).get(failure.rank)  # None if not of this host
            if slot is not None and slot == blamed and len(slots) > self.options.min_processes:
                slots = tuple(other for other in slots if other != slot)
                self.output.log(f"{failure} in two attempts on end; going on with {len(slots)} processes without it")
            blamed = slot
            await self._back_off(failure)
        return outcome

    async def _back_off(self, failure: Failure | None) -> None:
        """Waits before that restart."""
        wait = self.backoff()
        self.output.log(f"failed: {failure}; restart {self.restarts} of {self.options.max_restarts} in {wait:g} s")
        await self._unless_signalled(asyncio.sleep(wait))

    async def _try(self, restart: int, slots: tuple[int, ...]) -> Outcome:
        return await self._lead_attempt(
            Remote(), "127.0.0.1", lambda coordinator: Plan(restart, slots, 0, len(slots), coordinator)
        )

    async def _lead_attempt(self, remote: Remote, host: str, plan_of: Callable[[str], Plan]) -> Outcome:
        """An attempt whose coordination service is here.

        Args:
          remote: the other hosts.
          host: a name or an address of this one.
          plan_of: begins the attempt on the other hosts, with a coordinator, and returns this host's part.
        """
        with environment.reserved_address(host) as coordinator:
            service = Service(self.output)
            try:
                plan = plan_of(coordinator)
                service.begin(coordinator, plan.num_processes)
                outcome = (await self._watch(plan, remote)).blamed_on(service.failure())
                if outcome.status != 0:
                    # Other launchers end their processes within the same time. After that they are given up.
                    patience = self.options.failure_grace + self.options.grace
                    try:
                        await self._unless_signalled(remote.stopped(), patience)
                    except TimeoutError:
                        pass
                    except SignalledError as error:
                        outcome = outcome.or_stopped(error.signum)
                return outcome
            finally:
                service.end()

    async def _watch(self, plan: Plan, remote: Remote) -> Outcome:
        self._attempt = Attempt(self, plan, remote)
        try:
            return await self._attempt.run()
        finally:
            self._attempt = None

    def _receive_signals(self) -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(initializer=leave_signals_to_main_thread))  # it looks up names
        # Not asyncio's subprocesses: they end only when their pipes are closed, and descendants may hold the pipes
        # open.
        loop.add_signal_handler(signal.SIGCHLD, self._reap)
        # The launcher's parent may block these signals, and the job's processes would inherit that.
        handlers = dict.fromkeys(FORWARDED_SIGNALS, self._signalled) | dict.fromkeys(_PASSED_ON, self._pass_on)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD, *handlers})
        for signum, handler in handlers.items():
            # A launcher in the background or under nohup inherits ignored signals, and must keep ignoring them.
            if signal.getsignal(signum) != signal.SIG_IGN:
                loop.add_signal_handler(signum, handler, signum)

    def _signalled(self, signum: int) -> None:
        self.queue.put_nowait(events.Signalled(signum))

    def _pass_on(self, signum: int) -> None:
        if self._attempt is not None:
            self._attempt.pass_on(signum)

    def _reap(self) -> None:
        if self._attempt is not None:
            self._attempt.reap()

    def _end_of(self, event: events.Event) -> Outcome | None:
        """The end of the job on this host, if it is a signal, or the word of the launcher that decides."""
        match event:
            case events.Signalled(signum):
                self.output.log(f"received {signal.Signals(signum).name}")
                return stopped_by(signum)
            case events.RemoteEnd(status, reason):
                if status:
                    self.output.log(f"failed: {reason}")
                return Outcome(status)
        return None

    async def _unless_signalled(self, waiting: Coroutine[Any, Any, T], seconds: float | None = None) -> T:
        """Waits for something. Raises SignalledError if a signal has come, TimeoutError if it takes longer."""
        task, signals = asyncio.create_task(waiting), asyncio.create_task(self._next_signal())
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

    async def _next_signal(self) -> int:
        """Waits for a signal. Other events stay queued."""
        others: list[events.Event] = []
        try:
            while not isinstance(event := await self.queue.get(), events.Signalled):
                others.append(event)
            return event.signum
        finally:
            # Events may arrive out of order. For example, host 0 may announce the job before the connection to it is
            # known.
            others += [self.queue.get_nowait() for _ in range(self.queue.qsize())]
            for event in others:
                self.queue.put_nowait(event)

    async def _drained(self, outcome: Outcome) -> int:
        """Returns the exit status once output is written. A success waits for slow readers until a signal."""
        patience = None if outcome.status == 0 else _DRAIN_SECONDS if outcome.is_stopped else self.options.grace
        try:
            await self._unless_signalled(self._all_written(), patience)
        except SignalledError as error:
            return outcome.status or 128 + error.signum
        except TimeoutError:
            pass
        return outcome.status or (_OUTPUT_LOST if self.output.is_lost else 0)

    async def _all_written(self) -> None:
        copying = set(self.copying)
        while copying:
            _, copying = await asyncio.wait(copying, timeout=_DRAIN_SECONDS)
            if copying and self.output.is_idle():
                break  # a descendant holds a pipe open, but writes nothing
        for task in copying:
            task.cancel()
        if copying:
            await asyncio.wait(copying)
        await self.output.written()
