"""Trainings on hosts that are network namespaces with links of their own: one is killed, stopped or cut off."""

import coming_hosts
import pytest
from trial import Trial


@pytest.fixture(autouse=True)
def needs_hosts():
    if coming_hosts.why_not():
        pytest.skip(coming_hosts.why_not())


@pytest.mark.parametrize("scenario", [coming_hosts.killed, coming_hosts.cut_off], ids=lambda f: f.__name__)
def test_the_host_that_leads_is_lost(scenario):
    Trial(1).run(lambda trial: scenario(trial, victim=0))


def test_any_host_is_stopped():
    Trial(2).run(coming_hosts.stopped)
