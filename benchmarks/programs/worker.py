"""Runs one program both ways, in this process, and prints what came of it as a line of JSON."""

import argparse
import collections
import contextlib
import json
import os
import random
import re
import sys
import time
from pathlib import Path

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))  # a program has only its own folder on the path

from programs import registry

BY_XLA = re.compile(
    r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter|ragged-all-to-all)(?:-start)?\("
)
BY_ENGINE = re.compile(r'custom_call_target="jax_ring_(\w+)"')
_COMPILATION = "/jax/core/compile/backend_compile_duration"


class Compilations:
    """What JAX compiles for several devices: the seconds, and the executables, which it keeps."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._seen: dict[int, object] = {}
        self._new: list = []
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, seconds: float, **_) -> None:
        if event != _COMPILATION:
            return
        for executable in jax.devices()[0].client.live_executables():
            if id(executable) not in self._seen:
                self._seen[id(executable)] = executable
                if len(executable.local_devices()) > 1:
                    self.seconds += seconds
                    self._new.append(executable)

    def take(self) -> tuple[float, collections.Counter, collections.Counter]:
        """The seconds since the last call, and the collectives in what was compiled: the engine's, and XLA's."""
        engine, xla = collections.Counter(), collections.Counter()
        for executable in self._new:
            for module in executable.hlo_modules():
                text = module.to_string()
                engine.update(BY_ENGINE.findall(text))
                xla.update(BY_XLA.findall(text))
        seconds, self.seconds, self._new = self.seconds, 0.0, []
        return seconds, engine, xla


def arrays_of(tree) -> dict[str, np.ndarray]:
    """The leaves of a result by their places in it."""
    leaves = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        leaves[jax.tree_util.keystr(path)] = np.asarray(leaf)
    return leaves


def compare(actual: dict, expected: dict) -> dict:
    """How many arrays have other bits, and the largest difference in units of the array's largest element."""
    assert actual.keys() == expected.keys(), "the results have different trees"
    different, largest, where = 0, 0.0, ""
    for name, wanted in expected.items():
        x = actual[name]
        assert (x.shape, x.dtype) == (wanted.shape, wanted.dtype), name
        if x.tobytes() == wanted.tobytes():
            continue
        different += 1
        wide = np.complex128 if np.iscomplexobj(x) else np.float64
        gap = np.abs(x.astype(wide) - wanted.astype(wide)).max() / max(np.abs(wanted.astype(wide)).max(), 1e-30)
        if not gap <= largest and not np.isnan(largest):  # NaN counts as the largest
            largest, where = float(gap), name
    finite = all(np.isfinite(x.astype(np.complex128)).all() for x in expected.values() if x.dtype.kind in "fcV")
    return {
        "arrays": len(expected), "different": different, "largest": largest, "where": where, "finite": finite,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--rounds", type=int, default=1, help="how often each way is run")
    arguments = parser.parse_args()
    registry.load_all()
    chosen = registry.PROGRAMS[arguments.name]
    num_devices = int(np.prod(list(chosen.mesh.values())))
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)
    from jax_ring import override_lax

    mesh = jax.make_mesh(
        tuple(chosen.mesh.values()), tuple(chosen.mesh), (jax.sharding.AxisType.Auto,) * len(chosen.mesh)
    )
    compilations = Compilations()

    def run(by_engine: bool) -> tuple:
        random.seed(0)
        np.random.seed(0)
        calculate = chosen.prepare(mesh)
        compilations.take()
        begin = time.perf_counter()
        with override_lax(partitioner=True) if by_engine else contextlib.nullcontext():
            results = arrays_of(calculate())
        return results, time.perf_counter() - begin, *compilations.take()

    runs = []
    for i in range(2 * arguments.rounds):
        by_engine = i % 4 in (1, 2)
        runs.append((by_engine, run(by_engine)))
        if 1 <= i < 2 * arguments.rounds - 1:
            jax.clear_caches()
    xla, engine = ([each for by, each in runs if by is way] for way in (False, True))
    print(
        json.dumps(
            {
                "name": arguments.name,
                "jax": jax.__version__,
                "devices": num_devices,
                "before": dict(xla[0][4]),
                "replaced": dict(engine[0][3]),
                "left": dict(engine[0][4]),
                "compile": [[each[2] for each in way] for way in (xla, engine)],
                "seconds": [[each[1] for each in way] for way in (xla, engine)],
                "xla_again": [compare(each[0], xla[0][0])["different"] for each in xla[1:]],
                **compare(engine[0][0], xla[0][0]),
            }
        ),
        flush=True,
    )
    os._exit(0)  # some programs leave threads behind


if __name__ == "__main__":
    main()
