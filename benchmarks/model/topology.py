"""Describes the links of hosts and network, and the time of messages that share them."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from model.cost import Link

FOLDER = Path(__file__).parent / "topologies"


@dataclass(frozen=True)
class Topology:
    """Hosts with equal numbers of ranks, and a network between them. Ranks fill hosts, and hosts fill groups, in order.

    A message takes a latency plus the time of its busiest link: all bytes over the link in that step, divided by its
    bandwidth. All bandwidths are per direction.
    """

    name: str
    ranks_per_host: int
    host_latency: float  # seconds
    host_bandwidth: float  # bytes/s per rank within the host
    network_latency: float  # seconds
    nics_per_host: int
    nic_bandwidth: float  # bytes/s
    fold_bandwidth: float = np.inf  # bytes/s of folding; infinite if a rank folds while it receives
    shared_bandwidth: float = np.inf  # bytes/s of all messages of a host together, as over a bridge
    hosts_per_group: int = 0  # hosts under the same leaf switches; 0 for all
    oversubscription: float = 1.0  # bandwidth to the hosts of a leaf switch over that of its uplinks
    rails: bool = False  # the i-th NICs of the hosts of a group share a leaf switch
    striped: bool = False  # a message between hosts uses all NICs, as with NCCL's channels
    launch_latency: float = 0.0  # seconds per call
    source: str = ""  # where the figures come from

    def host_link(self) -> Link:
        """The link between two ranks of an otherwise idle host."""
        return Link(self.host_latency, 1 / self.host_bandwidth, 1 / self.fold_bandwidth)

    def network_link(self) -> Link:
        """The link between two ranks of different, otherwise idle hosts."""
        striped = min(self.nic_bandwidth * self.nics_per_host, self.host_bandwidth)
        bandwidth = striped if self.striped else self.nic_bandwidth
        return Link(self.network_latency, 1 / bandwidth, 1 / self.fold_bandwidth)

    def slowest_link(self, num_ranks: int) -> Link:
        """The slowest link of a ring over this number of ranks."""
        return self.host_link() if num_ranks <= self.ranks_per_host else self.network_link()

    def seconds(self, source: np.ndarray, to: np.ndarray, num_bytes: float) -> np.ndarray:
        """Seconds of each message, if messages of `num_bytes` go from each `source` to its `to` at the same time."""
        host, host_to = source // self.ranks_per_host, to // self.ranks_per_host
        remote = host != host_to
        busy = np.zeros(len(source))

        def add_load(keys: np.ndarray, mask: np.ndarray, bandwidth: float) -> None:
            load = np.bincount(keys[mask]) * (num_bytes / bandwidth)
            busy[mask] = np.maximum(busy[mask], load[keys[mask]])

        # A striped message reaches the NICs over the links within the host.
        through_host = ~remote | self.striped
        add_load(source, through_host, self.host_bandwidth)
        add_load(to, through_host, self.host_bandwidth)
        if np.isfinite(self.shared_bandwidth):
            load = np.bincount(host) + np.bincount(host_to[remote], minlength=host.max() + 1)[: host.max() + 1]
            busy = np.maximum(busy, load[host] * (num_bytes / self.shared_bandwidth))
        if remote.any():
            nics = 1 if self.striped else self.nics_per_host
            bandwidth = self.nic_bandwidth * self.nics_per_host / nics
            nic, nic_to = (x % self.ranks_per_host * nics // self.ranks_per_host for x in (source, to))
            add_load(host * nics + nic, remote, bandwidth)
            add_load(host_to * nics + nic_to, remote, bandwidth)
            if self.hosts_per_group:
                leaves = nics if self.rails else 1
                leaf = host // self.hosts_per_group * leaves + (nic if self.rails else 0)
                leaf_to = host_to // self.hosts_per_group * leaves + (nic_to if self.rails else 0)
                up = self.hosts_per_group * self.nics_per_host * self.nic_bandwidth / leaves / self.oversubscription
                add_load(leaf, remote & (leaf != leaf_to), up)
                add_load(leaf_to, remote & (leaf != leaf_to), up)
        return np.where(remote, self.network_latency, self.host_latency) + busy


def names() -> list[str]:
    """The names of the topologies described here."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load(name_or_path: str) -> Topology:
    """Loads a topology of `names()`, or one from the path of a TOML file.

    Latencies are in microseconds (`host.latency_us`), bandwidths in GB/s (`host.gb_per_s`).

    Raises:
      ValueError: if a key is missing or unknown, or a value is out of range.
    """
    if not name_or_path.endswith(".toml") and name_or_path not in names():
        raise ValueError(
            f"no topology {name_or_path!r}: choose one of {', '.join(names())}, or give the path of a .toml file"
        )
    path = Path(name_or_path) if name_or_path.endswith(".toml") else FOLDER / f"{name_or_path}.toml"
    data = tomllib.loads(path.read_text())
    flat = {f"{table}.{key}": value for table in ("host", "network") for key, value in data.pop(table, {}).items()}
    try:
        topology = Topology(
            name=data.pop("name"),
            source=data.pop("source", ""),
            launch_latency=data.pop("launch_us", 0.0) * 1e-6,
            fold_bandwidth=data.pop("fold_gb_per_s", np.inf) * 1e9,
            ranks_per_host=flat.pop("host.ranks"),
            host_latency=flat.pop("host.latency_us") * 1e-6,
            host_bandwidth=flat.pop("host.gb_per_s") * 1e9,
            shared_bandwidth=flat.pop("host.shared_gb_per_s", np.inf) * 1e9,
            network_latency=flat.pop("network.latency_us") * 1e-6,
            nics_per_host=flat.pop("network.nics_per_host"),
            nic_bandwidth=flat.pop("network.nic_gb_per_s") * 1e9,
            hosts_per_group=flat.pop("network.hosts_per_group", 0),
            oversubscription=flat.pop("network.oversubscription", 1.0),
            rails=flat.pop("network.rails", False),
            striped=flat.pop("network.striped", False),
        )
    except KeyError as error:
        raise ValueError(f"{name_or_path}: the topology has no {error.args[0]!r}") from error
    if data or flat:
        raise ValueError(f"{name_or_path}: unknown keys {sorted([*data, *flat])}")
    positive = (
        "ranks_per_host",
        "host_bandwidth",
        "nics_per_host",
        "nic_bandwidth",
        "fold_bandwidth",
        "oversubscription",
    )
    for field in positive:
        if not getattr(topology, field) > 0:
            raise ValueError(f"{name_or_path}: {field} must be positive, got {getattr(topology, field)}")
    for field in ("launch_latency", "host_latency", "network_latency"):
        if not getattr(topology, field) >= 0:
            raise ValueError(f"{name_or_path}: {field} must not be negative, got {getattr(topology, field)}")
    return topology
