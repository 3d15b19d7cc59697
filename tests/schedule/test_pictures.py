"""Diagrams, animations and plots of schedules."""

import pathlib
import sys

import pytest
from model import __main__ as command
from model import draw, plots, schedules, topology, training
from tiers import full_but

pytestmark = pytest.mark.one_pair  # does not depend on JAX's version

MEASURED = pathlib.Path(__file__).parents[2] / "benchmarks/results/cpu-2-cores"


def main(*arguments):
    command.main(command.parser().parse_args([str(argument) for argument in arguments]))


@pytest.mark.full
def test_the_animation_has_all_steps(tmp_path):
    from PIL import Image

    file = tmp_path / "ring.gif"
    main("ring", "--ranks", 2, "--animate", file)
    with Image.open(file) as image:
        image.verify()
    with Image.open(file) as image:
        assert image.n_frames > 2 * draw.FRAMES_PER_STEP


def test_the_animated_states_are_those_of_a_ring():
    states = draw._states(draw.traced(schedules.ring, 4, 4), 4, 4)
    assert len(states) == 7
    # Block 0 starts at rank 1, block 3 at rank 0.
    assert [states[step][step + 1][0] for step in range(3)] == [{1}, {1, 2}, {1, 2, 3}]
    assert states[1][1] == [{1}, {1}, {1}, {0, 1}]
    complete = [[sum(len(ranks) == 4 for ranks in chunks) for chunks in state] for state in states]
    assert complete == [[0] * 4, [0] * 4, [0] * 4, [1] * 4, [2] * 4, [3] * 4, [4] * 4]


@pytest.mark.parametrize("name", full_but(schedules.ALGORITHMS, ["ring"]))
def test_diagrams(name, tmp_path, capsys):
    files = tmp_path / "1.svg", tmp_path / "2.svg"
    for file in files:
        main(name, "--ranks", 4, "--draw", file)
    assert files[0].read_bytes() == files[1].read_bytes()
    assert f"{name}, 4 ranks: " in capsys.readouterr().out


@pytest.mark.full
def test_maps_and_curves(tmp_path):
    hosts = topology.load("nvswitch8")
    names = [plots.COMPARED[i] for i in plots.fastest(hosts, [2, 8, 64], [1e3, 1e10]).ravel()]
    assert names[0] == names[2] == "one_shot"
    assert names[4] == "halving_doubling"
    assert names[5] in ("ring", "two_level")
    draw.save(plots.crossover_map(hosts, max_ranks=16), tmp_path / "map.svg")
    main("fit", *sorted(MEASURED.glob("allreduce-p*.json")), "--draw", tmp_path / "fit.svg")
    main("simulate", "two_level", "--ranks", 64)
    assert (tmp_path / "fit.svg").stat().st_size > 1000


def test_overlap_hides_what_fits_into_the_backward_pass():
    workload = training.Workload()
    compute = workload.forward + workload.backward

    def all_reduce(n):
        return n / 1e11

    whole = all_reduce(workload.gradient_bytes)
    assert training.step_seconds(workload, all_reduce, 1, False) == pytest.approx(compute + whole)
    assert training.step_seconds(workload, all_reduce, 10, True) == pytest.approx(compute + whole / 10)
    slow = training.step_seconds(workload, lambda n: 100 * all_reduce(n), 10, True)
    assert slow == pytest.approx(workload.forward + workload.backward / 10 + 100 * whole)


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'jax-ring\[benchmarks\]'"):
        draw.pyplot()
