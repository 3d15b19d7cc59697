"""Commits on disk, written and read by one process with orbax."""

import importlib.util
import pathlib
from typing import Any

import jax
import numpy as np

from jax_ring.elastic.snapshots import UNDIVIDED, Snapshot

_KEPT = 2


class Checkpoints:
    """A directory of commits, a folder each, for one process at a time; the newest two are kept."""

    def __init__(self, directory: str) -> None:
        if importlib.util.find_spec("orbax") is None:
            raise ImportError(
                "State(directory=...) writes with orbax, which is not installed: pip install orbax-checkpoint"
            )
        self.directory = pathlib.Path(directory).absolute()

    def write(self, number: int, snapshot: Snapshot) -> None:
        """Writes a commit without divided leaves, and waits until it is on disk."""
        import orbax.checkpoint as ocp

        paths = [leaf.path for leaf in snapshot.leaves if leaf.dtype is not None]
        found = zip(paths, snapshot.arrays[UNDIVIDED], strict=True)
        arrays = {path: np.asarray(array) for path, array in found if array.size}  # orbax writes none without elements
        items: dict[str, Any] = {"header": ocp.args.JsonSave({"json": snapshot.header([UNDIVIDED]).decode()})}
        if arrays:  # nor an empty tree
            items["arrays"] = ocp.args.StandardSave(arrays)
        with self._manager() as manager:
            if number in manager.all_steps():  # made anew, because not all processes had made it
                manager.delete(number)
            manager.save(number, args=ocp.args.Composite(**items), force=True)
            manager.wait_until_finished()

    def newest_number(self) -> int:
        """The number of the newest commit on disk, found without a backend; 0 if there is none."""
        import orbax.checkpoint as ocp

        folders = ocp.path.step.standard_name_format().find_all(self.directory)
        return max((each.step for each in folders), default=0)

    def read(self, number: int) -> Snapshot:
        """A commit on disk. Its first use starts the backend. Raises RuntimeError if it is damaged."""
        import orbax.checkpoint as ocp

        folder = self.directory / str(number)
        if not (folder / "header").is_dir():
            raise RuntimeError(f"State(directory=...): {folder} is of another version of jax_ring, or no checkpoint")
        items: dict[str, Any] = {"header": ocp.args.JsonRestore()}
        if (folder / "arrays").is_dir():
            items["arrays"] = ocp.args.StandardRestore()
        with self._manager() as manager:
            restored = manager.restore(number, args=ocp.args.Composite(**items))
        snapshot, sections = Snapshot.of_header(str(restored["header"].get("json")).encode(), str(folder))
        if snapshot.num_parts or sections != [UNDIVIDED]:
            raise RuntimeError(f"State(directory=...): {folder} is damaged: it has parts of leaves")
        found = restored.get("arrays") or {}
        arrays = snapshot.arrays[UNDIVIDED] = []
        for leaf in snapshot.leaves:
            if leaf.dtype is None:
                continue
            array = np.empty(leaf.shape, leaf.dtype) if 0 in leaf.shape else np.asarray(found.get(leaf.path))
            if (array.shape, array.dtype) != (leaf.shape, leaf.dtype):
                raise RuntimeError(
                    f"State(directory=...): {folder} is damaged: it has {array.dtype}{[*array.shape]} at {leaf.path} "
                    f"instead of {leaf.dtype}{[*leaf.shape]}"
                )
            arrays.append(array)
        return snapshot

    def _manager(self):
        """A manager that does not wait for other processes."""
        import orbax.checkpoint as ocp

        self.directory.mkdir(parents=True, exist_ok=True)
        process = jax.process_index()
        alone = ocp.options.MultiprocessingOptions(primary_host=process, active_processes={process})
        options = ocp.CheckpointManagerOptions(
            max_to_keep=_KEPT, create=False, enable_async_checkpointing=False, multiprocessing_options=alone
        )
        return ocp.CheckpointManager(self.directory, options=options, item_names=("arrays", "header"))
