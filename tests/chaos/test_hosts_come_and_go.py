"""Trainings on hosts that are network namespaces with links of their own: one is stopped or cut off."""

import coming_hosts
import pytest
import random_faults
from trial import Trial

pytestmark = [pytest.mark.full, pytest.mark.one_pair]  # jobs of several processes; the launcher is Python's


@pytest.fixture(autouse=True)
def needs_hosts():
    if coming_hosts.why_not():
        pytest.skip(coming_hosts.why_not())


def test_the_host_that_leads_is_cut_off():
    Trial(1).run(lambda trial: coming_hosts.cut_off(trial, victim=0))


def test_a_flipped_bit_is_found_and_a_host_is_stopped_in_the_recovery():
    trial = Trial(1031)
    trial.run(lambda trial: random_faults.any_fault(trial, faults=2, processes=1))
    assert trial.part == ("the end of a training", 0)
    assert [(name, outcome.ended) for name, outcome in trial.outcomes] == [("in a recovery", "goes on")]
