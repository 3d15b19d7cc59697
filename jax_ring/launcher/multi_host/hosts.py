"""A job on several hosts: what launchers do beside running their own processes."""

import errno

from jax_ring.launcher import environment, events
from jax_ring.launcher.arguments import Options
from jax_ring.launcher.elastic_hosts.host import ElasticHost
from jax_ring.launcher.environment import Plan
from jax_ring.launcher.job import Job, SignalledError
from jax_ring.launcher.multi_host.links import Hub, Spoke
from jax_ring.launcher.shared import Outcome, stopped_by


class FirstHost(Job):
    """Decides for all hosts, and hosts the coordination service."""

    async def _attempts(self) -> Outcome:
        options, log = self.options, self.output.log
        self._hub = Hub(options.nnodes, self.queue)
        host, port = options.coordinators[0]
        try:
            server = await self._hub.start(host, port)
        except OSError as error:
            is_taken = error.errno == errno.EADDRINUSE
            why = "Another program listens there" if is_taken else "It has to be an address of this host"
            log(f"cannot listen at --coordinator {host}:{port}: {error}. {why}")
            return Outcome(1)
        if (why_not := environment.why_unreachable(server, host)) is not None:
            log(why_not)
        try:
            outcome = await super()._attempts()
        except SignalledError as error:
            outcome = stopped_by(error.signum)
        reason = "" if outcome.status == 0 else f"host 0: {outcome.failure or 'it was told to end'}"
        await self._hub.end(outcome.status, reason)
        return outcome

    async def _try(self, restart: int, slots: tuple[int, ...]) -> Outcome:
        options = self.options
        try:
            while True:
                await self._unless_signalled(self._hub.gathered(), options.node_timeout)
                if not self._hub.missing():  # one may have gone again before this goes on
                    break
        except TimeoutError:
            missing = ", ".join(map(str, self._hub.missing()))
            self.output.log(f"failed: hosts {missing} are not there after {options.node_timeout:g} s (--node-timeout)")
            return Outcome(1, is_ended=True)

        def plan_of(coordinator: str) -> Plan:
            total = self._hub.begin(restart, options.processes, coordinator)
            return Plan(restart, slots, 0, total, coordinator)

        return await self._lead_attempt(self._hub, options.coordinators[0][0], plan_of)


class OtherHost(Job):
    """Follows host 0."""

    async def _attempts(self) -> Outcome:
        options, log = self.options, self.output.log
        assert options.node_rank is not None
        self._spoke = Spoke(options.node_rank, self.queue)
        host, port = options.coordinators[0]
        connecting = self._spoke.connect(host, port, options.nnodes, options.processes)
        try:
            await self._unless_signalled(connecting, options.node_timeout)
        except TimeoutError:
            log(f"failed: no launcher of host 0 at {host}:{port} within {options.node_timeout:g} s (--node-timeout)")
            return Outcome(1)
        try:
            return await self._follow()
        finally:
            await self._spoke.close()

    async def _follow(self) -> Outcome:
        while True:
            event = await self.queue.get()
            if (end := self._end_of(event)) is not None:
                return end
            if isinstance(event, events.RemoteBegin):
                outcome = await self._watch(event.plan, self._spoke)
                if outcome.is_stopped or outcome.is_ended:
                    return outcome
                self._spoke.tell("stopped", True)


def job(options: Options) -> Job:
    if options.min_nodes:
        return ElasticHost(options)
    if options.nnodes == 1:
        return Job(options)
    return OtherHost(options) if options.node_rank else FirstHost(options)
