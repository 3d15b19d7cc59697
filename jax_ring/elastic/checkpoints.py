"""Commits on disk, written and read by one process with orbax."""

import contextlib
import importlib.util
import os
import pathlib
import stat
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jax_ring.elastic.snapshots import UNDIVIDED, Snapshot
from jax_ring.launcher.coordinator.folder import trusted_users
from jax_ring.launcher.schema import escaped

_KEPT = 2
_MAX_NUMBER = 1 << 62  # of a commit; those after it are counted in 63 bits


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
        """The number of the newest commit on disk, found without a backend; 0 if there is none.

        Raises RuntimeError if something there is not what a commit is made of.
        """
        import orbax.checkpoint as ocp

        self._check_files()
        folders = ocp.path.step.standard_name_format().find_all(self.directory)
        newest = max((each.step for each in folders), default=0)
        if newest > _MAX_NUMBER:
            raise RuntimeError(
                f"State(directory=...): {self.directory / str(newest)} is no checkpoint: jobs do not make so many "
                "commits. Remove it."
            )
        return newest

    def read(self, number: int) -> Snapshot:
        """A commit on disk. Its first use starts the backend. Raises RuntimeError if it is damaged."""
        import orbax.checkpoint as ocp

        folder = self.directory / str(number)
        if not (folder / "header").is_dir():
            raise RuntimeError(f"State(directory=...): {folder} is of another version of jax_ring, or no checkpoint")
        with self._manager() as manager:
            try:
                header = manager.restore(number, args=ocp.args.Composite(header=ocp.args.JsonRestore()))["header"]
                text = str(header.get("json") if isinstance(header, dict) else header).encode()
            except (ValueError, RecursionError) as error:
                raise _damaged(folder, f"its header is no JSON: {error}") from error
            snapshot, sections = Snapshot.of_header(text, escaped(str(folder)))
            if snapshot.num_parts or sections != [UNDIVIDED]:
                raise _damaged(folder, "it has parts of leaves")
            leaves = [leaf for leaf in snapshot.leaves if leaf.dtype is not None]
            types = {leaf.path: _type(leaf) for leaf in leaves if 0 not in leaf.shape}
            # Before orbax reads them: it takes the memory for what is said beside them, and ends without so much.
            _check_types(folder, _types_on_disk(folder), types)
            found: Mapping[str, Any] = {}
            if types:
                found = manager.restore(number, args=ocp.args.Composite(arrays=ocp.args.StandardRestore()))["arrays"]
        arrays = {path: np.asarray(array) for path, array in found.items()}
        _check_types(folder, {path: _type(array) for path, array in arrays.items()}, types)
        snapshot.arrays[UNDIVIDED] = [
            arrays[leaf.path] if leaf.path in types else np.empty(leaf.shape, leaf.dtype) for leaf in leaves
        ]
        return snapshot

    def _check_files(self) -> None:
        """Raises RuntimeError unless commits, also unfinished ones, are files and folders: links lead out of here.

        Raises PermissionError if others may put links there at any time.
        """
        with contextlib.suppress(FileNotFoundError):
            found = self.directory.stat()
            owners = {found.st_uid, self.directory.lstat().st_uid}
            if not owners <= trusted_users(self.directory) or found.st_mode & stat.S_IWOTH:
                raise PermissionError(
                    f"State(directory=...): other users than this process's, {os.geteuid()}, may decide what is in "
                    f"{escaped(str(self.directory))}, of user {found.st_uid} and mode {stat.S_IMODE(found.st_mode):o}, "
                    "and have the job read and write other files of yours: take a directory of your own."
                )
        for path in self.directory.glob("[0-9]*"):
            if not path.name.split(".")[0].isdecimal():
                continue
            for each in (path, *path.rglob("*")):
                mode = each.lstat().st_mode
                if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                    what = "a link" if stat.S_ISLNK(mode) else "neither a file nor a folder"
                    raise RuntimeError(
                        f"State(directory=...): {escaped(str(each))} is {what}, which jax_ring has not made. Find out "
                        f"who has, and remove {escaped(str(path))}, or take a directory that nobody else can write to."
                    )

    def _manager(self):
        """A manager that does not wait for other processes. It reads something of all commits on disk."""
        import orbax.checkpoint as ocp

        self.directory.mkdir(mode=0o775, parents=True, exist_ok=True)
        self._check_files()
        process = jax.process_index()
        alone = ocp.options.MultiprocessingOptions(primary_host=process, active_processes={process})
        options = ocp.CheckpointManagerOptions(
            max_to_keep=_KEPT, create=False, enable_async_checkpointing=False, multiprocessing_options=alone
        )
        return ocp.CheckpointManager(self.directory, options=options, item_names=("arrays", "header"))


def _type(array: Any) -> str:
    return f"{array.dtype}{[*array.shape]}"


def _types_on_disk(folder: pathlib.Path) -> dict[str, str]:
    """What orbax will find in the folder of a commit, by path. Raises RuntimeError if it would take more memory."""
    import orbax.checkpoint as ocp

    if not (folder / "arrays").is_dir():
        return {}
    tree: Any = ocp.StandardCheckpointHandler().metadata(folder / "arrays").tree
    if not isinstance(tree, dict) or not all(isinstance(each, ocp.metadata.ArrayMetadata) for each in tree.values()):
        raise _damaged(folder, "it has something else than arrays")
    for path, each in tree.items():
        if path.startswith("/"):  # orbax takes it for the array's folder
            raise _damaged(folder, f"its array {path} is elsewhere")
        chunk = (each.storage and each.storage.chunk_shape) or ()
        if any(n > max(1, size) for n, size in zip(chunk, each.shape, strict=False)):
            raise _damaged(folder, f"{path}, of the shape {[*each.shape]}, has chunks of {[*chunk]}")
    return {path: _type(each) for path, each in tree.items()}


def _check_types(folder: pathlib.Path, found: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    for path in (*wanted, *found):
        is_there, should_be = found.get(path, "nothing"), wanted.get(path, "nothing")
        if is_there != should_be:
            raise _damaged(folder, f"it has {is_there} at {path} instead of {should_be}")


def _damaged(folder: pathlib.Path, what: str) -> RuntimeError:
    return RuntimeError(f"State(directory=...): {escaped(f'{folder} is damaged: {what}')}")
