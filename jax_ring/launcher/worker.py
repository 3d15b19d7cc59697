"""Runs the user's script in a process of `jax_ring.launch`, for `jax.distributed.initialize` without arguments.

It is run by path: importing the package would import JAX, before which scripts set environment variables. `python -m
jax_ring run` uses it, too.
"""

# ruff: noqa: E402  # before anything else is imported
import sys

_OF_PYTHON = frozenset(sys.modules)  # what a program finds imported

import atexit
import contextlib
import ctypes
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import io
import os
import pkgutil
import signal
import threading
import types
from collections.abc import Callable, Mapping

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_DEADLINE_SECONDS = 60.0  # without JAX_RING_TIMEOUT_S
# What a process of the launcher needs once the script runs.
_BESIDE = ("protocol.py", "watching/page.py", "coordinator/client.py", "../foreign_errors.py")


@functools.cache
def load_beside(path: str):
    """Loads a file, named from this folder, that imports nothing of the package."""
    name = "_jax_ring_" + os.path.splitext(path)[0].replace("/", "_")
    spec = importlib.util.spec_from_file_location(name, os.path.join(os.path.dirname(__file__), path))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def die_with_parent(launcher_pid: int) -> None:
    """Makes the kernel kill this process when the launcher ends, even by a kill."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # The launcher may have exited before the call above.
    if os.getppid() != launcher_pid:
        raise SystemExit(128 + signal.SIGKILL)


def keep_from_programs(files: str) -> None:
    """Keeps the launcher's files from programs that the script starts by whatever call, maybe as another user.

    Its forks have them. files: their descriptors, with commas between them.
    """
    for file in files.split(","):
        os.set_inheritable(int(file), False)


def with_environment_defaults(initialize: Callable, own: Mapping[str, str]) -> Callable:
    """`jax.distributed.initialize` with the launcher's coordination service.

    Number of processes and process id come from the launcher, where JAX reads only the coordinator's address and local
    device ids. With another coordinator, process 0 starts a service as usual.

    own: the variables that the launcher has set; the script may have changed its environment.
    """

    @functools.wraps(initialize)
    def initialize_with_defaults(coordinator_address=None, num_processes=None, process_id=None, *rest, **options):
        if num_processes is None:
            num_processes = int(own["JAX_NUM_PROCESSES"])
        if process_id is None:
            process_id = int(own["JAX_PROCESS_ID"])
        client, coordinator = load_beside("coordinator/client.py"), own["JAX_COORDINATOR_ADDRESS"]
        if (coordinator_address or os.environ.get("JAX_COORDINATOR_ADDRESS")) == coordinator:
            client.check_mtls(options, bool(own.get("JAX_MTLS_CERT_FILE")))
            client.keep_on_host(coordinator)
            load_beside("protocol.py").tell_initialize()
            service = client.without_service()
        else:
            service = contextlib.nullcontext()
        with client.with_own_handler(), service:
            initialize(coordinator_address, num_processes, process_id, *rest, **options)
        _programs_of_job()

    return initialize_with_defaults


# ---- The end of a process that others may need -----------------------------------------------------------------------


_is_failing = False  # whether an exception or a status ends this process


@functools.cache
def _programs_of_job():
    """The programs of this process. It waits for them when it ends, before JAX drops them."""
    pid, programs = os.getpid(), load_beside("coordinator/client.py").Programs()

    def wait_at_exit() -> None:
        if os.getpid() != pid:
            return
        # Where the script uses jax_ring, that has waited.
        if not _is_failing and "jax_ring.distributed.exit_notice" not in sys.modules:
            with contextlib.suppress(Exception):
                programs.wait(_deadline())
        programs.end()

    atexit.register(wait_at_exit)
    return programs


def waiting_for_programs(shutdown: Callable) -> Callable:
    """`jax.distributed.shutdown`: the launcher's coordination service does not make processes wait for each other."""

    @functools.wraps(shutdown)
    def wait_and_shut_down():
        if _programs_of_job.cache_info().currsize:
            _programs_of_job().wait(_deadline())
        return shutdown()

    return wait_and_shut_down


def _deadline() -> float:
    with contextlib.suppress(ValueError):
        return float(os.environ.get("JAX_RING_TIMEOUT_S", ""))
    return _DEADLINE_SECONDS


# ---- Hooks for what the script imports -------------------------------------------------------------------------------


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function with a module once the script has imported it."""

    def __init__(self, name: str, function: Callable) -> None:
        self._name, self._function = name, function
        self._of_thread = threading.local()

    def find_spec(self, fullname, path=None, target=None):
        if fullname != self._name or vars(self._of_thread):
            return None
        self._of_thread.is_looking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            del self._of_thread.is_looking
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            # Not before: a module may also be looked up without an import.
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self._function(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def after_import(name: str, function: Callable) -> None:
    """Calls a function with a module once it is imported: now, if something has done so when Python started."""
    if name in sys.modules:
        function(sys.modules[name])
    else:
        sys.meta_path.insert(0, AfterImport(name, function))


def watch_process() -> None:
    """Lets the launcher see where this process is, and what it executes."""
    if page := load_beside("watching/page.py").Page.of_launcher():
        page.write_stacks_on_signal()
    if os.environ.get("JAX_RING_WATCH"):
        after_import("jax", lambda jax: importlib.import_module("jax_ring.progress.watch").watch_executions())


def patch_initialize() -> None:
    """Replaces `jax.distributed.initialize` once JAX is imported."""
    own = dict(os.environ)

    def patch(module):
        module.initialize = with_environment_defaults(module.initialize, own)
        module.shutdown = waiting_for_programs(module.shutdown)

    after_import("jax.distributed", patch)


def blamed_process(error: BaseException | None) -> int | None:
    """The process whose failure caused an exception; -1 if unknown, None for this one.

    Causes and contexts count as well. What jax_ring has raised is known to the package's modules, which are loaded
    then.
    """
    runtime, protocol = map(sys.modules.get, ("jax_ring.runtime", "jax_ring.launcher.protocol"))
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        failure = runtime and runtime.failure_of(error)
        if failure and failure.process is not None:
            return failure.process
        if load_beside("../foreign_errors.py").OF_ANOTHER.search(str(error)) or (
            protocol and isinstance(error, protocol.RefusedError)
        ):
            return -1
        error = error.__cause__ or error.__context__
    return None


def reason_of(error: BaseException) -> BaseException | None:
    """The exception that ends this process, also where the script has caught it and exits; None for an exit alone."""
    if not isinstance(error, SystemExit):
        return error
    caught = error.__cause__ or error.__context__
    return caught if isinstance(caught, Exception) and error.code not in (None, 0) else None


def report(error: BaseException) -> None:
    """Tells the launcher the exception that ends this process."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    load_beside("protocol.py").report_failure(name, str(error), blamed_process(error))


def forget_own_modules() -> dict[str, types.ModuleType]:
    """Removes what this program has imported, and returns it, so that it stays.

    A module beside the script may have the name of one of these. The script gets that, as under Python, and what is
    here goes on with its own.
    """
    return {name: sys.modules.pop(name) for name in [*sys.modules] if name not in _OF_PYTHON}


def run(kind: str, *command: str) -> None:
    """Runs a module, script, folder or zip file as Python would; under JAX_RING_OVERRIDE=1 jax_ring follows JAX."""
    if os.environ.get("JAX_RING_OVERRIDE", "") not in ("", "0"):
        after_import("jax", lambda jax: importlib.import_module("jax_ring"))
    sys.argv[:] = command
    path = os.path.abspath(command[0])
    # Not by runpy's public functions: their `__main__` is gone when the handlers of atexit run.
    own, main = sys.modules["__main__"], types.ModuleType("__main__")
    vars(main).update({name: value for name, value in vars(own).items() if name.startswith("__")}, __doc__=None)
    sys.modules["__main__"] = main
    kept = forget_own_modules()
    if kind == "module":
        sys.path.insert(0, os.getcwd())
        _run_module(command[0])
    elif pkgutil.get_importer(path) is not None:
        sys.path.insert(0, path)
        _run_module("__main__", alter_argv=False)
    else:
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
        vars(main).update(__file__=path, __loader__=importlib.machinery.SourceFileLoader("__main__", path))
        exec(_code_of(path), vars(main))
    del kept


def _run_module(name: str, **options: bool) -> None:
    """What Python calls, which imports it for that alone."""
    importlib.import_module("runpy")._run_module_as_main(name, **options)


def _code_of(path: str) -> types.CodeType:
    try:
        with io.open_code(path) as file:
            text = file.read()
    except OSError as error:
        print(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}", file=sys.stderr)
        raise SystemExit(2) from None
    return pkgutil.read_code(io.BytesIO(text)) or compile(text, path, "exec", dont_inherit=True)


def run_for_launcher(launcher_pid: str, files: str, kind: str, *command: str) -> None:
    global _is_failing
    die_with_parent(int(launcher_pid))
    keep_from_programs(files)
    pid = os.getpid()
    for path in _BESIDE:
        load_beside(path)
    patch_initialize()
    watch_process()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # as on a terminal
    try:
        run(kind, *command)
    except BaseException as error:
        # A child that the script has forked comes here, too.
        if os.getpid() == pid:
            _is_failing = not isinstance(error, SystemExit) or error.code not in (None, 0)
            if isinstance(error, Exception | SystemExit) and (reason := reason_of(error)) is not None:
                report(reason)
        raise


if __name__ == "__main__":
    if sys.argv[1] == "alone":
        run(*sys.argv[2:])
    else:
        run_for_launcher(*sys.argv[1:])
