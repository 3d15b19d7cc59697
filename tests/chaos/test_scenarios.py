"""The chaos program's cheapest scenarios, once each: that they run, and that they notice what they look for."""

import pathlib

import faults
import launched_jobs
import pytest
from trial import Outcome, Trial, Unexpected

pytestmark = pytest.mark.one_pair  # the launcher is Python's


@pytest.mark.full
@pytest.mark.parametrize("scenario", [faults.brief_stops, launched_jobs.killed_launcher], ids=lambda f: f.__name__)
def test_scenario_ends_as_expected(scenario):
    outcome = Trial(3).run(scenario)
    assert outcome.faults > 0
    assert not outcome.ended.startswith("not tried")


def test_what_is_left_behind_is_noticed(tmp_path):
    def leaves_a_segment(trial):
        pathlib.Path(f"/dev/shm/jax_ring-{trial.folder.name}").touch()
        return Outcome("as expected")

    with pytest.raises(Unexpected, match=r"leftover: segments \['/dev/shm/jax_ring-chaos-") as raised:
        Trial(1).run(leaves_a_segment)
    assert not pathlib.Path(str(raised.value).split("'")[1]).exists()  # it is removed


def test_wrong_bits_are_told_from_other_ends():
    def fails(trial):
        raise AssertionError("process 1 returned 1\nWRONG BITS in [3] of 5 calls" if trial.seed else "another")

    for seed, kind in ((1, "wrong bits"), (0, "other end")):
        with pytest.raises(Unexpected) as raised:
            Trial(seed).run(fails)
        assert raised.value.kind == kind
