"""`State`: what a job goes on from."""

import zlib
from typing import Any, Literal, get_args

import jax
import numpy as np

from jax_ring.elastic.checkpoints import Checkpoints
from jax_ring.elastic.generation import Generation, Leave
from jax_ring.elastic.kept import KeptCommits
from jax_ring.elastic.restore import Stores, restore
from jax_ring.elastic.snapshots import Divided, Snapshot, array_of
from jax_ring.options import check_choice, integer

# One process may have completed a commit in which another failed, but not the following commit.
_KEPT = 2

Keep = Literal["process", "host"]


class State:
    """The state of a training that survives its processes.

        state = jax_ring.elastic.State(params=params, opt_state=opt_state, step=0)

    Each keyword is a tree, an attribute to read and replace: `state.step += 1`. A leaf is

    - an array of JAX that all processes have, or of numpy, or any Python value;
    - an array of JAX divided over all devices, such as a sharded optimizer's state.

    All processes make the state alike, and trees keep their structure.

    Args:
      directory: where commits are also written to disk, by process 0 with orbax. A job starts from the newest
        checkpoint there, if there is one, and goes on from it when parts of a divided leaf are lost.
      every: every how many commits one is written.
      keep: where commits are: "process", in the memory of the processes, and parts of divided leaves in that of the
        launcher; or "host", all in that of the launcher as well, so that the job goes on from the last one when all its
        processes are lost. Process 0 then copies what is the same in all processes once more. With several hosts, a
        process of each host does, and parts have a copy on another host. No effect without a launcher.
      trees: the state.

    Raises:
      ValueError: if one of `directory` and `every` is given alone, if `every` is not positive, `keep` is not a choice,
        or a tree has the name of a method or a property.
      TypeError: if `every` is no integer.
      ImportError: if orbax is not installed, with `directory`.
    """

    def __init__(
        self, *, directory: str | None = None, every: int | None = None, keep: Keep = "process", **trees: Any
    ) -> None:
        check_choice("State", "keep", keep, get_args(Keep))
        if (directory is None) != (every is None):
            raise ValueError(
                f"State: directory and every go together, got directory={directory!r} and every={every!r}. With both, "
                "every so many commits one is written to the directory."
            )
        if every is not None and (every := integer("State", "every", every)) < 1:
            raise ValueError(f"State: every must be at least 1, got {every}")
        hidden = self.__dict__
        hidden["_names"] = tuple(trees)
        hidden["_values"] = trees
        hidden["_checkpoints"] = Checkpoints(directory) if directory is not None else None
        hidden["_kept"] = KeptCommits.of_launcher(parts_only=keep == "process")
        hidden["_every"] = every
        hidden["_snapshots"] = []
        hidden["_generation"] = None
        hidden["_made_in"] = -1  # the generation of the commits
        if taken := [name for name in trees if name in hidden or hasattr(type(self), name)]:
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
                f"the state has no {name!r}, only {', '.join(self._names)}. What it has is named when it is made: "
                f"State({name}=..., ...)."
            )
        self.__dict__["_values"] = {**self._values, name: value}  # a copy of the state keeps its own

    def __repr__(self) -> str:
        return f"State({', '.join(self._names)}; {self.commits} commits)"

    @property
    def commits(self) -> int:
        """The number of commits of this job; restoring one sets it back."""
        return self._snapshots[-1].number if self._snapshots else 0

    @property
    def outlives_processes(self) -> bool:
        """Whether a job goes on from its commits when all processes have ended."""
        return (self._kept is not None and not self._kept.parts_only) or self._checkpoints is not None

    def commit(self) -> None:
        """Copies the state to host memory, from which the job goes on when a process is lost.

        All processes call it at the same points. Each copies its part of divided leaves, to memory of the launcher as
        well. It waits for the state and the other processes. If members are to change, it does not return: `run` enters
        its function anew.

        Raises:
          RuntimeError: outside a function of `run`, or if processes commit different states.
          TypeError: if a leaf cannot be copied.
          jax.errors.JaxRuntimeError, ValueError: if a process has been lost. `run` handles it.
        """
        generation = self._generation
        if generation is None:
            raise RuntimeError(
                "State.commit: this is not inside a function that jax_ring.elastic.run decorates, called with this "
                "state"
            )
        snapshot = Snapshot.of(self._values, self.commits + 1, generation.process, generation.num_processes)
        # Do not keep the state yet: only when all have come this far is it known to be usable.
        change = _agreed(generation, snapshot)
        writes = self._every is not None and snapshot.number % self._every == 0
        snapshot, whole = _with_others(generation, snapshot, whole_in_first=writes)
        if self._kept is not None and len(self._snapshots) == 1:
            # The first commit of a generation: all have restored an earlier one, and need its parts no longer. Another
            # state, or the process that this one replaces, has commits of the same numbers.
            self._kept.forget_parts()
        self.__dict__["_snapshots"] = [*self._snapshots, snapshot][-_KEPT:]
        if self._kept is not None:
            self._kept.write(snapshot, generation)
        if whole is not None:
            assert self._checkpoints is not None
            self._checkpoints.write(whole)
        if change:
            raise Leave("the members change after a commit")

    def _enter(self, generation: Generation) -> int:
        """Takes the values to start from; returns the number of new processes."""
        self.__dict__["_generation"] = generation
        stores = Stores(self._kept, self._checkpoints)
        snapshot, newcomers = restore(generation, self._made_in, self._snapshots, self._values, stores)
        if self._kept is not None and generation.hosts.has_several_hosts and snapshot.number:
            # Copies of its parts may be gone with a host. Until the next commit each host has all of it.
            self._kept.write(snapshot, generation)
        # Every leaf is complete here, so another process may be lost before the next commit.
        self.__dict__.update(_snapshots=[snapshot], _values=snapshot.trees(), _made_in=generation.number)
        return newcomers

    def _leave(self) -> None:
        """Drops the generation's arrays: values are as before the first commit, or missing."""
        values, generation = self._values, self._generation
        if self._snapshots:
            # Keep the structure: data from another process is compared with it.
            values = jax.tree.map(lambda leaf: 0, values)
        else:
            process, count = (generation.process, generation.num_processes) if generation else (0, 1)
            values = Snapshot.of(values, 0, process, count).trees_without_backend()
        self.__dict__.update(_generation=None, _values=values)


def _agreed(generation: Generation, snapshot: Snapshot) -> bool:
    """Whether members change after this commit; raises RuntimeError if others commit something else."""
    pending = generation.change_pending()
    if generation.num_processes == 1:
        return pending
    leaves = [array_of(leaf) for leaf in snapshot.leaves]
    described = [(leaf.shape, str(leaf.dtype)) if isinstance(leaf, np.ndarray | Divided) else None for leaf in leaves]
    digest = zlib.crc32(repr((snapshot.number, described)).encode()) >> 1  # 31 bits
    any_pending, most, least = generation.exchange.most([pending, digest, -digest])
    if most != -least:
        raise RuntimeError(
            f"State.commit: the processes commit different states. This one, process {generation.process}, makes "
            f"commit {snapshot.number} of {len(leaves)} leaves, of the shapes "
            f"{[each and each[0] for each in described][:8]}. All must commit equally often, and leaves of equal "
            "shapes."
        )
    return bool(any_pending)


def _with_others(
    generation: Generation, snapshot: Snapshot, *, whole_in_first: bool
) -> tuple[Snapshot, Snapshot | None]:
    """A commit with the parts that this process keeps for others; in process 0, on request, a whole one."""
    process, count = generation.process, generation.num_processes
    everything = whole_in_first and process == 0
    if snapshot.held is None or not (whole_in_first or generation.hosts.has_several_hosts):
        return snapshot, snapshot.whole() if everything else None
    kept = generation.hosts.kept_by(process)
    sizes = [snapshot.num_bytes(p) for p in range(count)]
    received = generation.exchange.gather(
        snapshot.packed(process), sizes, [p for p in range(count) if p != process and (everything or p in kept)]
    )
    whole = snapshot.with_parts(received).whole() if everything else None
    return snapshot.with_parts({p: received[p] for p in kept}), whole
