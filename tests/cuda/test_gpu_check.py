"""The program of the GPU check, without a GPU: limits, the report, and what it reads from other programs."""

import os
import pathlib
import subprocess
import sys
import time

import pytest
from command_buffers import Recorded, recorded

from jax_ring.launcher.processes import state_of

sys.path.append(str(pathlib.Path(__file__).parents[2] / "benchmarks" / "gpu"))

from gpu_check import run_limited
from gpu_check_measure import metrics_of_launches
from gpu_check_parts import PARTS
from gpu_check_report import MEANING, TESTS, has_failed, report

PASSED = {"tests": 3, "failures": 0, "errors": 0, "skipped": 1, "failed": [], "why_skipped": ["no kernels of f64"]}
FAILED = PASSED | {"failures": 1, "failed": ["test_x[3-streams]"]}


@pytest.mark.full
def test_a_part_that_hangs_is_killed_with_its_processes(tmp_path, monkeypatch):
    # The inner process stands for a rank whose kernel waits for ever.
    file = tmp_path / "pid"
    inner = f"import os, time; print(os.getpid(), file=open({str(file)!r}, 'w'), flush=True); time.sleep(600)"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"

    class Popen(subprocess.Popen):
        def wait(self, timeout=None):
            # The limit is for what hangs: on a busy machine, the start of both may take longer.
            while timeout and self.poll() is None and not (file.exists() and file.read_text()):
                time.sleep(0.01)
            return super().wait(timeout)

    monkeypatch.setattr(subprocess, "Popen", Popen)
    assert run_limited([sys.executable, "-c", outer], 0.1) is None
    pid = int(file.read_text())
    for _ in range(100):  # until it has ended
        if state_of(pid) in ("", "Z", "X"):
            return
        time.sleep(0.1)
    pytest.fail(f"process {pid} is still running")


def test_a_part_within_its_limit():
    assert run_limited([sys.executable, "-c", "raise SystemExit(7)"], 60) == 7
    queues = "import os; raise SystemExit(int(os.environ['CUDA_DEVICE_MAX_CONNECTIONS']))"
    assert run_limited([sys.executable, "-c", queues], 60) == int(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", 32))


def test_the_first_failure_is_explained():
    results = {"processes": FAILED, "streams": FAILED, "boundaries": PASSED, "first_calls": {"right": ["a", "b"]}}
    text = report(results, dry=False)
    assert "## The first part that failed\n\nstreams: failed: test_x[3-streams]\nIt works in one launch" in text
    assert text.count("share a hardware queue") == 1
    assert "2 calls of 4 bytes are right" in text
    assert "Skipped in boundaries: no kernels of f64" in text
    assert "The first part that failed" not in report({"boundaries": PASSED}, dry=False)
    hung = {"first_calls": {"error": "not finished within 60 s", "log": "test_x[3-streams]"}}
    assert "first_calls: not finished within 60 s\nThe smallest call fails" in report(hung, dry=False)
    assert "```\ntest_x[3-streams]\n```" in report(hung, dry=False)
    assert has_failed(hung["first_calls"])
    assert not has_failed(PASSED)


def test_every_part_is_reported():
    assert list(MEANING) == [part for part in PARTS if part in MEANING]  # the first failure is the first in this order
    assert set(PARTS) - set(MEANING) == {"measure", "xla"}
    assert set(TESTS) < set(PARTS)
    # A GPU is lent for ten minutes, and a hang is to leave time for the parts after it.
    assert max(part.limit for part in PARTS.values()) <= 150


NCU = """==PROF== Connected to process 7
==PROF== Profiling "fill": 0%....100% - 1 pass
"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","7","memset_kernel","gpu__time_duration.sum","us","1.5"
"1","7","collective","gpu__time_duration.sum","us","1,204.5"
"1","7","collective","launch__registers_per_thread","register/thread","96"
"2","7","collective","gpu__time_duration.sum","us","8"
"""


def test_metrics_of_nsight_compute():
    first, second = metrics_of_launches(NCU)
    assert first == {"gpu__time_duration.sum": "1,204.5 us", "launch__registers_per_thread": "96 register/thread"}
    assert second == {"gpu__time_duration.sum": "8 us"}
    assert metrics_of_launches("==ERROR== no permission\n") == []


LOOP_AS_A_WHOLE = """000: kCommandBuffer [source | sink]
    001: kCopy  [source       | next=003 (2)] kCopy
    003: kWhile [prev=002 (1) | sink        ]
condition:
        004: kCustomKernel [source | sink] loop_compare_fusion grid: [1, 1, 1]
      body:
        005: kCustomKernel [source       | sink        ] loop_add_fusion grid: [1, 1, 1]
        006: kCustomCall   [source       | next=007 (1)] kCustomCall
"""
ONLY_KERNELS = """003: kWhile         [prev=000 (1) | sink        ]
condition:
    004: kCustomKernel [source | sink] loop_compare_fusion grid: [1, 1, 1]
  body:
    000: kCommandBuffer [source       | sink        ]
        005: kCustomKernel [source | sink] loop_add_fusion grid: [1, 1, 1]
    006: kCustomCall    [source       | next=000 (1)] kCustomCall
    000: kCommandBuffer [prev=006 (1) | sink        ]
        007: kCustomKernel [source | sink] loop_multiply_fusion grid: [8, 1, 1]
"""


def test_what_xla_records(tmp_path):
    file = tmp_path / "module_0001.jit_f.thunk_sequence_after_thunk_passes.txt"
    file.write_text(LOOP_AS_A_WHOLE)
    assert recorded(tmp_path, "jit_f") == Recorded(inside=1, outside=0, loops=1)
    assert recorded(tmp_path, "jit_g") == Recorded(0, 0, 0)
    file.write_text(ONLY_KERNELS)
    assert recorded(tmp_path, "jit_f") == Recorded(inside=0, outside=1, loops=0)
