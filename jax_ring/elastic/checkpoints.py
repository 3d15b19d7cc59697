"""Commits on disk, written and read by one process with orbax."""

import importlib.util
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ring.elastic.snapshots import Snapshot, Typed, array_of
from jax_ring.options import path_texts

_KEPT = 2


class Checkpoints:
    """A directory of commits, a folder each, for one process at a time; the newest two are kept."""

    def __init__(self, directory: str) -> None:
        if importlib.util.find_spec("orbax") is None:
            raise ImportError(
                "State(directory=...) writes with orbax, which is not installed: pip install orbax-checkpoint"
            )
        self.directory = pathlib.Path(directory).absolute()

    def write(self, snapshot: Snapshot) -> None:
        """Writes a commit without divided leaves, and waits until it is on disk.

        Raises TypeError if a leaf is neither an array nor a value of JSON.
        """
        import orbax.checkpoint as ocp

        arrays, others = {}, {}
        for path, leaf in zip(snapshot.paths(), snapshot.leaves, strict=True):
            array = array_of(leaf)
            if not isinstance(array, np.ndarray):
                others[path] = leaf
                continue
            more: dict[str, Any] = {}
            if isinstance(leaf, Typed):
                more = {"random keys of": leaf.key_impl} if leaf.key_impl else {"weak type": True}
            if array.size:
                arrays[path] = array
            else:  # orbax writes none
                more["empty"] = [array.shape, str(array.dtype)]
            if more:
                others[path] = more
        try:
            json.dumps(others)
        except TypeError as error:
            raise TypeError(
                f"State(directory=...): a leaf that is no array cannot be written as JSON: {error}"
            ) from error
        items: dict[str, Any] = {"others": ocp.args.JsonSave(others)}
        if arrays:  # orbax writes no empty tree
            items["arrays"] = ocp.args.StandardSave(arrays)
        with self._manager() as manager:
            if snapshot.number in manager.all_steps():  # made anew, because not all processes had made it
                manager.delete(snapshot.number)
            manager.save(snapshot.number, args=ocp.args.Composite(**items), force=True)
            manager.wait_until_finished()

    def newest_number(self) -> int:
        """The number of the newest commit on disk; -1 if there is none."""
        if not self.directory.is_dir():
            return -1
        with self._manager() as manager:
            number = manager.latest_step()
        return -1 if number is None else number

    def read(self, number: int, values: Mapping[str, Any]) -> Snapshot:
        """A commit on disk. Raises ValueError if it has another structure than the state's values."""
        import orbax.checkpoint as ocp

        items: dict[str, Any] = {"others": ocp.args.JsonRestore()}
        if (self.directory / str(number) / "arrays").is_dir():
            items["arrays"] = ocp.args.StandardRestore()
        with self._manager() as manager:
            restored = manager.restore(number, args=ocp.args.Composite(**items))
        arrays, others = restored.get("arrays") or {}, restored["others"]
        paths = path_texts(dict(values))
        if set(paths) != {*arrays, *others}:
            raise ValueError(
                f"State(directory={str(self.directory)!r}): the checkpoint {number} there is of another state. The "
                f"leaves that only one of them has are {sorted(set(paths) ^ {*arrays, *others})[:6]}. Pass another "
                "directory, or remove this one."
            )
        leaves = [_leaf(arrays.get(path), others.get(path)) for path in paths]
        return Snapshot(number, jax.tree.structure(dict(values)), leaves, 1, None)

    def _manager(self):
        """A manager that does not wait for other processes."""
        import orbax.checkpoint as ocp

        self.directory.mkdir(parents=True, exist_ok=True)
        process = jax.process_index()
        alone = ocp.options.MultiprocessingOptions(primary_host=process, active_processes={process})
        options = ocp.CheckpointManagerOptions(
            max_to_keep=_KEPT, create=False, enable_async_checkpointing=False, multiprocessing_options=alone
        )
        return ocp.CheckpointManager(self.directory, options=options, item_names=("arrays", "others"))


def _leaf(array: Any, other: Any) -> Any:
    """A leaf from its array, if that was written, and what else was."""
    described = other if isinstance(other, dict) else {}  # a leaf is no dictionary
    if "empty" in described:
        shape, dtype = described["empty"]
        array = np.empty(shape, jnp.dtype(dtype))
    if array is None:
        return other
    array = np.asarray(array)
    impl = described.get("random keys of")
    return Typed(array, impl) if impl or "weak type" in described else array
