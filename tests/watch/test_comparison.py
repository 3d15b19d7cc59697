"""Which processes are stuck, by the notes of all, without processes and clocks."""

import os

import pytest

from jax_ring.launcher.watching import page as pages
from jax_ring.launcher.watching import report
from jax_ring.launcher.watching.page import EXECUTIONS, STEPS, Notes, Page
from jax_ring.launcher.watching.report import Comparison, Member, Place, Verdict

pytestmark = pytest.mark.one_pair  # Python's own

LIMIT = 3.0


def note(started, completed, *, counts=STEPS, compiling=0.0, function="train"):
    return Notes(counts, LIMIT, False, started, completed, 1.0, compiling, function)


class Looks(Comparison):
    """A comparison at looks one second apart."""

    def __init__(self):
        super().__init__()
        self.now = 0.0

    def at(self, *notes, times=1, ended=()):
        """The verdicts of looks at the same notes."""
        found = []
        for _ in range(times):
            # A step of the clock may be no longer than two looks should take.
            for _ in range(4):
                self.now += 0.25
                found.append(self.look(dict(enumerate(notes)), self.now, LIMIT, ended))
        return [verdict for verdict in found if verdict]


def test_once_until_they_go_on():
    notes = note(12, 11), note(11, 11), note(12, 11)
    assert Looks().at(*notes, times=3) == []
    looks = Looks()
    assert looks.at(*notes, times=20) == [Verdict(12, (0, 1, 2))]
    assert looks.at(*notes[:2], note(13, 12), times=20) == []
    assert looks.at(*[note(14, 13)] * 3, times=20) == [Verdict(14, (0, 1, 2))]


def test_no_alarm():
    looks = Looks()
    # In steps, between them for any time, and far behind others without being stuck.
    for step in range(100):
        assert looks.at(note(step + 1, step), note(step, step), times=2) == []
    assert looks.at(note(100, 100), note(100, 100), times=100) == []
    for step in range(100):
        assert looks.at(note(900 + step, 900 + step), note(step, step), times=2) == []
    # Nothing is known of those that are complete, because all outputs are donated.
    for step in range(20):
        assert looks.at(note(900 + step, 800), note(900 + step, 900), times=2) == []
    # One that watches nothing is no reason for an alarm.
    assert Looks().at(note(5, 5), note(0, 0, counts=0), times=20) == []


def test_time_in_which_the_launcher_could_not_run_does_not_count():
    comparison = Comparison()
    for now in (1.0, 1000.0, 2000.0):
        assert comparison.look({0: note(1, 0)}, now, LIMIT) is None


def test_those_who_hang_a_little_later_are_named_as_well():
    """One could not note that it had completed step 11."""
    looks = Looks()
    assert looks.at(note(11, 10), note(11, 10), times=1) == []
    assert looks.at(note(12, 11), note(11, 10), times=20) == [Verdict(11, (0, 1))]
    # A third one has other things to do, and goes on.
    looks = Looks()
    for step in range(20):
        found = looks.at(note(52, 51), note(51, 51), note(step, step))
        assert found == ([Verdict(52, (0, 1))] if step == 3 else [])


def test_one_that_has_exited_is_still_ahead():
    def found(ended, *notes):
        return Looks().at(*notes, times=20, ended=[ended])

    assert found(note(5, 5), note(3, 3)) == [Verdict(4, (0,))]
    assert found(note(5, 5), note(5, 5)) == found(note(5, 5), note(7, 7)) == []
    assert found(note(5, 5, counts=EXECUTIONS), note(3, 3)) == []


def test_a_compilation_stops_the_clock():
    looks = Looks()
    assert looks.at(note(1, 0), note(1, 0, compiling=1.0), times=100) == []
    assert looks.at(note(1, 0), note(1, 0), times=3) == []
    assert looks.at(note(1, 0), note(1, 0), times=1) == [Verdict(1, (0, 1))]


def test_one_that_has_not_come_to_the_first_step():
    assert Looks().at(note(1, 0), note(0, 0, counts=0), times=5) == [Verdict(1, (0, 1))]


def test_executions_have_no_common_numbers():
    waits, idle = note(70, 69, counts=EXECUTIONS), note(40, 40, counts=EXECUTIONS)
    assert Looks().at(waits, idle, times=20) == [Verdict(None, (0, 1))]
    assert Looks().at(idle, idle, times=20) == []


def test_the_report():
    """Names the step by the function that is behind, whose processes come first; those that wait for it come last."""
    members = {
        0: Member(0, "rank 0 (pid 1)", None, note(6, 4, function="evaluate"), Place("device", table="a table\n")),
        1: Member(1, "rank 1 (pid 2)", None, note(4, 4), Place("python", "a call", "", "MainThread:\n  stack")),
        2: Member(2, "rank 2 (pid 3)", None, note(5, 4), Place(stacks="MainThread:\n  of a signal")),
        3: Member(3, "rank 3 (pid 4)", 0, note(6, 6)),
        4: Member(4, "rank 4 (pid 5)", None, note(0, 0, counts=0), Place("stopped")),
    }
    verdict = Verdict(5, (0, 1, 2, 4))
    assert report.text(verdict, members, 8.0, "jax_ring.watch").splitlines() == [
        "ranks 0, 1, 2, 4 have not completed step 5 (train) within 8 s (jax_ring.watch)",
        "  rank 1 (pid 2): in Python; began 4 steps, completed 4, the last 1.0 s ago",
        "      last call of jax_ring: a call",
        "      MainThread:",
        "        stack",
        "  rank 2 (pid 3): in Python; began 5 steps, completed 4, the last 1.0 s ago; its threads do not answer, "
        "as if one held Python's lock",
        "      MainThread:",
        "        of a signal",
        "  rank 4 (pid 5): stopped; has begun nothing",
        "  rank 0 (pid 1): in the device's program; began 6 steps, completed 4, the last 1.0 s ago",
        "  ranks that have exited: 3",
        "",
        "a table",
    ]
    assert report.blamed(verdict, members) == {
        1: "is stuck in step 5 (train): in Python",
        2: "is stuck in step 5 (train): in Python",
        4: "is stuck in step 5 (train): stopped",
    }
    assert report.blamed(Verdict(5, (0,)), members) == {0: "is stuck in step 5 (train): in the device's program"}


def test_stacks_of_a_signal():
    """Those of jax_ring are left out, and the main thread, which Python writes last, comes first."""
    stacks = f"""Thread 0x01 (most recent call first):
  File "{report._CALLERS[0]}/progress/process.py", line 2 in _run

Thread 0x02 (most recent call first):
  File "/nowhere/load.py", line 7 in read

Current thread 0x03 (most recent call first):
  File "{__file__}", line 1 in inner
  File "{report._CALLERS[0]}/progress/watch.py", line 1 in watched
  File "/nowhere/train.py", line 2 in <module>
"""
    assert [line for line in report.of_signal(stacks).splitlines() if line.strip()] == [
        "MainThread:",
        '  File "/nowhere/train.py", line 2, in <module>',
        f'  File "{__file__}", line 1, in inner',
        '    """Which processes are stuck, by the notes of all, without processes and clocks."""',
        "another thread:",
        '  File "/nowhere/load.py", line 7, in read',
    ]
    assert report.of_signal("") == ""


@pytest.fixture
def page():
    page = Page.new()
    yield page
    page.close()


def test_a_page(page):
    same = Page(os.dup(page.file))  # as another process has it
    page.words.counts = STEPS
    page.words.started = 7
    page.words.function = pages.cut("train")
    page.words.compiling = pages.cut("x" + "é" * 5000)
    notes = same.read()
    assert (notes.counts, notes.started, notes.completed, notes.compiling_for) == (STEPS, 7, 0, 0)
    assert (notes.function, notes.compiling) == ("train", "x" + "é" * 511)  # no half letters
    same.ask(pages.ASKED)
    page.answer("here")
    assert (same.words.question, same.behind()) == (pages.ANSWERED, "here")
    same.ask(0)
    assert same.behind() == ""
    os.write(page.file, b"stacks")  # as Python does
    assert same.behind() == "stacks"
    same.close()


def test_whose_page_it_is(page, monkeypatch, tmp_path):
    monkeypatch.delenv(pages.PAGE_VARIABLE, raising=False)
    assert Page.of_launcher() is None
    monkeypatch.setenv(pages.PAGE_VARIABLE, str(page.file))
    for _ in range(2):
        assert Page.of_launcher().file == page.file
    monkeypatch.setenv(pages.PAGE_VARIABLE, f"{page.file}:{os.getppid()}")  # this process was forked
    assert Page.of_launcher() is None
    with open(tmp_path / "other", "w") as other:
        monkeypatch.setenv(pages.PAGE_VARIABLE, str(other.fileno()))
        assert Page.of_launcher() is None
