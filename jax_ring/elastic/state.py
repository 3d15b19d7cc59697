"""`State`: what a job goes on from."""

import zlib
from typing import Any

from jax_ring.elastic.checkpoints import Checkpoints
from jax_ring.elastic.generation import Generation, Leave
from jax_ring.elastic.kept import KeptCommits
from jax_ring.elastic.restore import restore
from jax_ring.elastic.snapshots import Snapshot
from jax_ring.options import integer


class State:
    """The state of a training that survives its processes.

        state = jax_ring.elastic.State(params=params, opt_state=opt_state, step=0)

    Each keyword is a tree, an attribute to read and replace: `state.step += 1`. A leaf is

    - an array of JAX that all processes have, or of numpy, or a bool, int, float or str of Python;
    - an array of JAX divided over all devices, such as a sharded optimizer's state.

    All processes make the state alike, and trees keep their structure.

    Args:
      directory: where commits are also written to disk, by process 0 with orbax; of its user, and no one else may
        write there. A job starts from the newest checkpoint in it, if there is one, and goes on from that when parts of
        a divided leaf are lost.
      every: every how many commits one is written.
      trees: the state.

    Raises:
      ValueError: if one of `directory` and `every` is given alone, if `every` is not positive, or a tree has the
        name of a method or a property.
      TypeError: if `every` is no integer.
      ImportError: if orbax is not installed, with `directory`.
    """

    def __init__(self, *, directory: str | None = None, every: int | None = None, **trees: Any) -> None:
        if (directory is None) != (every is None):
            raise ValueError(
                f"State: directory and every go together, got directory={directory!r} and every={every!r}. With both, "
                "every so many commits one is written to the directory."
            )
        if every is not None and (every := integer("State", "every", every)) < 1:
            raise ValueError(f"State: every must be at least 1, got {every}")
        self.__dict__.update(
            _values=trees,
            _kept=KeptCommits.of_launcher(),
            _checkpoints=Checkpoints(directory) if directory is not None else None,
            _every=every,
            _commits=0,
            _generation=None,
        )
        if taken := [name for name in trees if name in self.__dict__ or hasattr(type(self), name)]:
            raise ValueError(
                f"State: a state has {', '.join(map(repr, taken))} already, for itself. Give the value another name."
            )

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__.get("_values", {})  # empty while a copy is made
        if name not in values:
            raise AttributeError(f"the state has no {name!r}; it has {', '.join(values)}")
        return values[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._values:
            raise AttributeError(
                f"the state has no {name!r}, only {', '.join(self._values)}. What it has is named when it is made: "
                f"State({name}=..., ...)."
            )
        self.__dict__["_values"] = {**self._values, name: value}  # a copy of the state keeps its own

    def __repr__(self) -> str:
        return f"State({', '.join(self._values)}; {self.commits} commits)"

    @property
    def commits(self) -> int:
        """The number of commits of this job; restoring one sets it back."""
        return self._commits

    def commit(self) -> None:
        """Copies the state to memory of the launcher, from which the job goes on when a process is lost.

        All processes call it at the same points. What is the same in all is copied once on each host, and parts of
        divided leaves by each process; with several hosts, they have a copy on another host. It waits for the state and
        the other processes. If members are to change, it does not return: new processes go on from here.

        Raises:
          RuntimeError: outside a function of `run`, or if processes commit different states.
          TypeError: if a leaf cannot be kept.
          jax.errors.JaxRuntimeError, ValueError: if a process has been lost.
        """
        generation = self._generation
        if generation is None:
            raise RuntimeError(
                "State.commit: this is not inside a function that jax_ring.elastic.run decorates, called with this "
                "state"
            )
        number = self._commits + 1
        snapshot = Snapshot.of(self._values, generation.process, generation.num_processes)
        change = _agreed(generation, number, snapshot)
        is_written = self._every is not None and number % self._every == 0
        _take_parts(generation, snapshot, whole_in_first=is_written)
        self._kept.write(number, snapshot, generation)
        self.__dict__["_commits"] = number
        if is_written and generation.process == 0:
            self._checkpoints.write(number, snapshot.undivided())
        if change:
            raise Leave("the members change after a commit")

    def _enter(self, generation: Generation) -> None:
        """Takes the values to start from."""
        number, snapshot = restore(generation, self._values, self._kept, self._checkpoints)
        if generation.hosts.has_several_hosts and number:
            # Copies of its parts may be gone with a host. Until the next commit each host has all of it.
            self._kept.write(number, snapshot, generation)
        self.__dict__.update(_generation=generation, _commits=number, _values=snapshot.trees(self._values))


def _agreed(generation: Generation, number: int, snapshot: Snapshot) -> bool:
    """Whether members change after this commit; raises RuntimeError if others commit something else."""
    pending = generation.change_pending()
    if generation.num_processes == 1:
        return pending
    types = snapshot.types()
    digest = zlib.crc32(repr((number, types)).encode()) >> 1  # 31 bits
    any_pending, most, least = generation.exchange.most([pending, digest, -digest])
    if most != -least:
        raise RuntimeError(
            f"State.commit: the processes commit different states. This one, process {generation.process}, makes "
            f"commit {number} of {len(types)} leaves, of the shapes {[shape for shape, *_ in types][:8]}. "
            "All must commit equally often, and leaves of equal shapes."
        )
    return bool(any_pending)


def _take_parts(generation: Generation, snapshot: Snapshot, *, whole_in_first: bool) -> None:
    """Takes the parts of which this process keeps copies; on request, in process 0 all."""
    process, parts = generation.process, range(snapshot.num_parts)
    if not parts or not (whole_in_first or generation.hosts.has_several_hosts):
        return
    takes = parts if whole_in_first and process == 0 else generation.hosts.kept_by(process)
    sizes = [snapshot.num_bytes(p) for p in parts]
    received = generation.exchange.gather(snapshot.packed([process]), sizes, [p for p in takes if p != process])
    for p, data in received.items():
        snapshot.unpack([p], data)
