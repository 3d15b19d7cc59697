"""Hosts that are network namespaces of this machine, joined by a bridge, whose cables can be pulled. Needs root.

with Hosts(2, rate="1gbit") as hosts:
    process = subprocess.Popen(hosts.command(0, [sys.executable, "train.py"]))
    hosts.pull_cable(1)

Each host has a name, a hosts file and a /dev/shm of its own. Gloo listens at the address that the host's name has.
"""

import contextlib
import os
import pathlib
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from typing import Self

_SCRIPT = """
mount --make-rprivate / && mount --bind "$1" /etc/hosts && mount -t tmpfs -o size="$3" tmpfs /dev/shm
hostname "$2" && shift 3 && exec "$@"
"""


def why_not() -> str:
    """Why this machine cannot have such hosts; empty if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc", "unshare"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    try:
        with Hosts(1) as hosts:
            subprocess.run(hosts.command(0, ["true"]), check=True, capture_output=True, timeout=20)
    except (subprocess.SubprocessError, OSError) as error:
        return f"a network namespace does not work here: {error}"
    return ""


class Hosts:
    """Network namespaces on one bridge. Leaving the `with` block removes them; end their processes first.

    Args:
      count: the number of hosts, at most 200.
      rate: the bandwidth of each cable, as `tc` writes it, such as "1gbit"; None for that of the machine.
      shm_bytes: the size of each /dev/shm.
    """

    def __init__(self, count: int, *, rate: str | None = None, shm_bytes: int = 1 << 28) -> None:
        self.count, self.rate, self.shm_bytes = count, rate, shm_bytes
        # Names of network devices have at most 15 characters. Another user of this module may run at the same time.
        self._prefix = f"jr{os.getpid() % 10**6}"
        self._namespaces = [f"{self._prefix}-{i}" for i in range(count)]
        self._network = f"{self._prefix}-net"
        self._folder = tempfile.TemporaryDirectory(prefix="hosts-")

    def __enter__(self) -> Self:
        try:
            self._create()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *exception) -> None:
        self._remove()

    def name(self, host: int) -> str:
        """The name that a host has for its own processes."""
        return f"{self._prefix}-host{host}"

    def address(self, host: int) -> str:
        """The address of a host, at which the others reach it."""
        return f"10.213.7.{host + 1}"

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """The command that runs another one on a host."""
        inside = ["unshare", "--mount", "--uts", "sh", "-ec", _SCRIPT, "sh"]
        own = [self._file(host), self.name(host), str(self.shm_bytes)]
        return ["ip", "netns", "exec", self._namespaces[host], *inside, *own, *command]

    def pull_cable(self, host: int) -> None:
        """Takes the network of a host down: packets to and from it are lost, without an error for either end."""
        _in(self._network, "ip", "link", "set", self._cable(host), "down")

    def plug_in(self, host: int) -> None:
        """The inverse of `pull_cable`."""
        _in(self._network, "ip", "link", "set", self._cable(host), "up")

    def split(self, hosts: Sequence[int]) -> None:
        """Moves hosts to a network of their own: they reach each other, but none of the rest."""
        for host in hosts:
            _in(self._network, "ip", "link", "set", self._cable(host), "master", "bridge2")

    def join(self) -> None:
        """The inverse of `split`."""
        for host in range(self.count):
            _in(self._network, "ip", "link", "set", self._cable(host), "master", "bridge")

    def limit(self, host: int, rate: str | None) -> None:
        """Sets the bandwidth of a cable, in the direction from the host; None for that of the machine."""
        if rate is None:
            _in(self._namespaces[host], "tc", "qdisc", "del", "dev", "eth0", "root")
            return
        limit = ("rate", rate, "burst", "256k", "latency", "50ms")
        _in(self._namespaces[host], "tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", *limit)

    def _create(self) -> None:
        addresses = "".join(f"{self.address(i)} {self.name(i)}\n" for i in range(self.count))
        _run("ip", "netns", "add", self._network)
        for bridge in ("bridge", "bridge2"):
            _in(self._network, "ip", "link", "add", bridge, "type", "bridge")
            _in(self._network, "ip", "link", "set", bridge, "up")
        for host, namespace in enumerate(self._namespaces):
            pathlib.Path(self._file(host)).write_text(f"127.0.0.1 localhost\n{addresses}")
            _run("ip", "netns", "add", namespace)
            # The end of the host's own is called eth0; the other one is its socket in the wall.
            _in(namespace, "ip", "link", "add", "eth0", "type", "veth", "peer", "name", self._cable(host))
            _in(namespace, "ip", "link", "set", self._cable(host), "netns", self._network)
            _in(self._network, "ip", "link", "set", self._cable(host), "master", "bridge", "up")
            _in(namespace, "ip", "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            _in(namespace, "ip", "link", "set", "eth0", "up")
            _in(namespace, "ip", "link", "set", "lo", "up")
            if self.rate is not None:
                self.limit(host, self.rate)

    def _remove(self) -> None:
        for namespace in (*self._namespaces, self._network):
            with contextlib.suppress(subprocess.CalledProcessError):
                _run("ip", "netns", "del", namespace)
        self._folder.cleanup()

    def _cable(self, host: int) -> str:
        return f"cable{host}"

    def _file(self, host: int) -> str:
        return str(pathlib.Path(self._folder.name, f"hosts{host}"))


def _in(namespace: str, *command: str) -> None:
    _run("ip", "netns", "exec", namespace, *command)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
