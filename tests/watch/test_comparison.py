"""Which processes are stuck, by the notes of all, without processes and clocks."""

import os

import pytest

from jax_ring.launcher.watching.page import EXECUTIONS, PAGE_VARIABLE, RECENT, SIZE, STEPS, Notes, Page
from jax_ring.launcher.watching.report import Comparison, Verdict

pytestmark = pytest.mark.one_pair  # Python's own

LIMIT = 3.0


def note(started, completed, *, counts=STEPS, generation=0, compiling=0):
    return Notes(counts, LIMIT, False, generation, started, started, completed, 1, compiling, {}, [], "")


def look(comparison, *notes, times=1):
    """The verdicts of looks one second apart at the same notes."""
    given = dict(enumerate(notes))
    return [verdict for _ in range(times) if (verdict := comparison.look(given, 1.0, LIMIT))]


def test_once_until_they_go_on():
    notes = note(12, 11), note(11, 11), note(12, 11)
    assert look(Comparison(), *notes, times=4) == []
    comparison = Comparison()
    assert look(comparison, *notes, times=20) == [Verdict((12, 12), (0, 1, 2))]
    assert look(comparison, *notes[:2], note(13, 12), times=20) == []
    assert look(comparison, *[note(14, 13)] * 3, times=20) == [Verdict((14, 14), (0, 1, 2))]


def test_no_alarm():
    comparison = Comparison()
    # In steps, between them for any time, and far behind others without being stuck.
    for step in range(100):
        assert look(comparison, note(step + 1, step), note(step, step), times=2) == []
    assert look(comparison, note(100, 100), note(100, 100), times=100) == []
    for step in range(100):
        assert look(comparison, note(900 + step, 900 + step), note(step, step), times=2) == []
    # One that watches nothing is no reason for an alarm, and a process that has left is not looked at.
    assert look(Comparison(), note(5, 5), note(0, 0, counts=0), times=20) == []
    assert look(Comparison(), note(5, 5), note(4, 3, generation=-1), times=20) == []
    # A new generation begins with step 1. Some have come to it later.
    comparison = Comparison()
    assert look(comparison, note(1, 1, generation=1), note(900, 899), times=20) == []


def test_those_who_hang_a_little_later_are_named_as_well():
    """One could not note that it had completed step 11."""
    comparison = Comparison()
    assert look(comparison, note(11, 10), note(11, 10), times=1) == []
    assert look(comparison, note(12, 11), note(11, 10), times=20) == [Verdict((11, 12), (0, 1))]
    # A third one has other things to do, and goes on.
    comparison = Comparison()
    for step in range(20):
        found = look(comparison, note(52, 51), note(51, 51), note(step, step))
        assert found == ([Verdict((52, 52), (0, 1))] if step == 4 else [])


def test_one_that_has_exited_is_still_ahead():
    def found(ended, *notes, times=20):
        comparison, given = Comparison(), dict(enumerate(notes))
        return [each for _ in range(times) if (each := comparison.look(given, 1.0, LIMIT, [ended]))]

    assert found(note(5, 5), note(3, 3)) == [Verdict((4, 4), (0,))]
    assert found(note(5, 5), note(5, 5)) == found(note(5, 5), note(7, 7)) == []
    assert found(note(5, 5), note(1, 1, generation=1)) == []  # of a generation that has ended
    assert found(note(5, 5, counts=EXECUTIONS), note(3, 3)) == []


def test_a_compilation_stops_the_clock():
    comparison = Comparison()
    assert look(comparison, note(1, 0), note(1, 0, compiling=1), times=100) == []
    assert look(comparison, note(1, 0), note(1, 0), times=3) == []
    assert look(comparison, note(1, 0), note(1, 0), times=1) == [Verdict((1, 1), (0, 1))]


def test_one_that_has_not_come_to_the_first_step():
    assert look(Comparison(), note(1, 0), note(0, 0, counts=0), times=5) == [Verdict((1, 1), (0, 1))]


def test_executions_have_no_common_numbers():
    waits, idle = note(70, 69, counts=EXECUTIONS), note(40, 40, counts=EXECUTIONS)
    assert look(Comparison(), waits, idle, times=20) == [Verdict(None, (0, 1))]
    assert look(Comparison(), idle, idle, times=20) == []


@pytest.fixture
def page():
    page = Page.new(0)
    yield page
    page.close()


def test_a_page(page):
    same = Page(os.dup(page.file))  # as another process has it
    assert page.begin(STEPS, 60.0, False, "train") == 0
    assert page.begin(STEPS, 30.0, True, "evaluate") == 1
    for step in range(1, 200):
        page.start(step, step % 2)
        page.returned(step)
        page.complete(step)
    page.start(200, 0)
    page.compile("jit_train")
    notes = same.read()
    assert notes[:7] == (STEPS, 30.0, True, 0, 200, 199, 199)
    assert (notes.names, notes.compiling) == (["train", "evaluate"], "jit_train")
    assert notes.compiling_since >= notes.completed_at > 0
    assert sorted(notes.recent) == list(range(201 - RECENT, 201))
    assert notes.recent[199].function == 1
    assert notes.recent[199].completed >= notes.recent[199].started > 0 == notes.recent[200].completed
    page.compile(None)
    # Names that do not fit are cut.
    assert page.begin(STEPS, 60.0, False, "é" * SIZE) == 2
    assert page.begin(STEPS, 60.0, False, "é" * SIZE) == 2
    train, evaluate, long = same.read().names
    assert (train[:5], evaluate[:4], set(long)) == ("train", "eval", {"é"})
    page.enter(3)
    page.complete(200)  # too late
    assert same.read()[3:7] == (3, 0, 0, 0)
    assert same.read().compiling_since == 0
    page.start(201, 0)
    assert same.read()[3:7] == (3, 1, 0, 0)
    same.close()


def test_whose_page_it_is(page, monkeypatch, tmp_path):
    monkeypatch.delenv(PAGE_VARIABLE, raising=False)
    assert Page.of_launcher() is None
    monkeypatch.setenv(PAGE_VARIABLE, str(page.file))
    for _ in range(2):
        assert Page.of_launcher().file == page.file
    monkeypatch.setenv(PAGE_VARIABLE, f"{page.file}:{os.getppid()}")  # this process was forked
    assert Page.of_launcher() is None
    with open(tmp_path / "other", "w") as other:
        monkeypatch.setenv(PAGE_VARIABLE, str(other.fileno()))
        assert Page.of_launcher() is None


def test_steps_take_the_place_of_executions(page):
    page.begin(EXECUTIONS, 0.0, False, "an execution")
    page.start(7, 0)
    page.begin(STEPS, 9.0, False, "train")
    page.start(1, 1)
    page.complete(1)
    assert page.read()[:7] == (STEPS, 9.0, False, 0, 1, 0, 1)
