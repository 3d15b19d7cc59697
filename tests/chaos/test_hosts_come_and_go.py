"""Trainings through faults, on one host and on network namespaces with links of their own."""

import any_fault
import pytest
import trainings
from trial import Trial

pytestmark = [pytest.mark.full, pytest.mark.one_pair]  # jobs of several processes; the launcher is Python's


@pytest.fixture(autouse=True)
def needs_hosts():
    if trainings.why_not():
        pytest.skip(trainings.why_not())


@pytest.mark.parametrize(("num_hosts", "seed"), [(1, 1), (3, 1)])
def test_a_training_through_two_faults(num_hosts, seed):
    trial = Trial(seed, num_hosts)
    trial.run(lambda trial: any_fault.any_fault(trial, faults=2))
    assert trial.part == ("the end of a training", 0)
    assert sum(outcome.faults for _, outcome in trial.outcomes) >= 2
