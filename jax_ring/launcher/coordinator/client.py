"""What a process does as a client of JAX's coordination service: how it joins, and how it ends.

`worker.py` loads this file by path, because it must not import the package. Private names of JAX are only used once the
script has imported it.
"""

import contextlib
import ctypes
import functools
import pathlib
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

_POLL_SECONDS = 0.002
# No program of JAX runs if most of so many looks within so many seconds show no thread of JAX that does.
_QUIET_SECONDS, _LOOKS = 0.1, 5


@contextlib.contextmanager
def without_service() -> Iterator[None]:
    """Within the block, `jax.distributed.initialize` starts no service in process 0."""
    from jax._src import distributed

    module, name = getattr(distributed, "_jax", None), "get_distributed_runtime_service"
    if (original := getattr(module, name, None)) is None:
        import jax

        raise RuntimeError(
            f"jax_ring.launch does not support JAX {jax.__version__}: jax._src.distributed has no "
            "_jax.get_distributed_runtime_service. Upgrade jax_ring, or install a version of JAX that it was tested "
            "with (see its README)."
        )
    setattr(module, name, lambda *args, **options: None)
    try:
        yield
    finally:
        setattr(module, name, original)


def keep_on_host(coordinator: str) -> None:
    """Has Gloo listen at the loopback interface alone, where no other host can reach the coordinator."""
    from jax._src import distributed

    module, name = distributed._jax, "make_gloo_tcp_collectives"
    if coordinator.startswith(("unix:", "127.", "[::1]:", "localhost:")) and hasattr(module, name):
        setattr(module, name, functools.partial(getattr(module, name), hostname="127.0.0.1"))


def check_mtls(options: Mapping[str, Any], has_mtls: bool) -> None:
    """Raises ValueError if the script alone asks for mutual TLS, or not: JAX would wait for minutes, then abort.

    options: those of `jax.distributed.initialize`. has_mtls: whether the launcher's coordination service uses it.
    """
    import jax

    given = options.get("mtls_cert_file") or getattr(jax.config, "jax_mtls_cert_file", None)
    if bool(given) != has_mtls:
        raise ValueError(
            f"jax.distributed.initialize: mtls_cert_file is {given!r}, but the coordination service of "
            f"jax_ring.launch {'uses' if has_mtls else 'does not use'} mutual TLS, by its own environment: set the "
            "variables JAX_MTLS_CERT_FILE, JAX_MTLS_KEY_FILE and JAX_MTLS_CA_FILE where it starts, or nowhere"
        )


@contextlib.contextmanager
def with_own_handler() -> Iterator[None]:
    """Within the block JAX may connect; the script's handler of SIGTERM, if it has one, is back afterwards.

    JAX's preemption service replaces it, and Python does not notice.
    """
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if callable(handler):
            with contextlib.suppress(ValueError):  # in another thread than the main one Python refuses
                signal.signal(signal.SIGTERM, handler)


class Programs:
    """The programs that this process has launched, which others may need until they have ended.

    There is nothing to ask: nobody may refer to their results. JAX runs programs of several devices, or of one device
    and thread, one after the other, so that another program tells. A launch on several devices waits for those before
    it without end, therefore a thread does it, which has to be there before Python ends. Programs on single devices
    that other threads have launched show by threads that run.
    """

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[threading.Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._answer, name="jax_ring end of programs", daemon=True)
        self._has_thread = False
        with contextlib.suppress(RuntimeError):  # at a limit of threads
            self._thread.start()
            self._has_thread = True

    def wait(self, seconds: float) -> bool:
        """Waits until they have ended, or failed. Returns whether they have, in the main thread.

        If not, the end of Python does not wait for them either.
        """
        has_ended = self._wait(seconds)
        if not has_ended:
            for client in _clients():  # whose end waits for its programs
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))
        return has_ended

    def _wait(self, seconds: float) -> bool:
        bridge: Any = sys.modules.get("jax._src.xla_bridge")
        if bridge is None or not bridge.backends_are_initialized():
            return True
        until = time.monotonic() + seconds
        try:
            results = [array for client in _clients() for array in client.live_arrays() if not array.is_deleted()]
            if not _come_true(until, *(array.is_ready for array in results)):
                return False
            have_ended = threading.Event()
            if self._has_thread:
                self._asked.put(have_ended)
            else:
                have_ended.set()
            last = [_launch([device]) for client in _clients() for device in client.local_devices()]
            if not _come_true(until, have_ended.is_set, *(array.is_ready for array in last)):
                return False
        except (RuntimeError, ValueError):  # JAX's errors: a program has failed, or its backend is gone
            return True
        while time.monotonic() < until:
            if sum(_is_computing() for _ in range(_LOOKS)) <= _LOOKS // 2:
                return True
        return False

    def end(self) -> None:
        """Ends the thread: one that came back from JAX while Python ends would end the process by a signal."""
        self._asked.put(None)
        if self._has_thread:
            self._thread.join(_QUIET_SECONDS)

    def _answer(self) -> None:
        while (have_ended := self._asked.get()) is not None:
            with contextlib.suppress(RuntimeError, ValueError):
                for client in _clients():
                    if len(client.local_devices()) > 1:
                        _launch(client.local_devices()).block_until_ready()
            have_ended.set()


def _clients() -> list[Any]:
    from jax.extend import backend

    return list({id(client): client for client in backend.backends().values()}.values())


def _launch(devices: list[Any]) -> Any:
    """The result of a program of these devices."""
    import jax
    import numpy as np

    mesh = jax.sharding.Mesh(np.array(devices), ("all",))
    sharding = jax.NamedSharding(mesh, jax.sharding.PartitionSpec("all"))
    return jax.jit(jax.lax.neg)(jax.device_put(np.zeros(len(devices), np.int32), sharding))


def _come_true(until: float, *conditions: Any) -> bool:
    """Waits until all these functions return true, each in its turn; returns whether they do in time."""
    for is_true in conditions:
        while not is_true():
            if time.monotonic() > until:
                return False
            time.sleep(_POLL_SECONDS)
    return True


def _is_computing() -> bool:
    """Whether a thread runs, or waits for a core, after a moment. Python's do not count: they may until the end."""
    time.sleep(_QUIET_SECONDS / _LOOKS)
    of_python = {str(thread.native_id) for thread in threading.enumerate()}
    for task in pathlib.Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError, KeyError):  # it has ended
            lines = (task / "status").read_text(errors="replace").splitlines()
            fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
            # The last number is Python's also where /proc is of another namespace.
            if fields["State"][0] in ("R", "D") and fields["NSpid"].split()[-1] not in of_python:
                return True
    return False
