"""Which processes are stuck, by the notes of all, without processes and clocks."""

import asyncio
import json
import math
import os
import re
import types

import pytest

from jax_ring.launcher.hosts import links
from jax_ring.launcher.hosts.messages import Message, decode
from jax_ring.launcher.schema import checked
from jax_ring.launcher.watching import page as pages
from jax_ring.launcher.watching import reader, report
from jax_ring.launcher.watching.page import EXECUTIONS, STEPS, Notes, Page
from jax_ring.launcher.watching.report import Place, Report
from jax_ring.launcher.watching.watcher import Watcher

pytestmark = pytest.mark.one_pair  # Python's own

LIMIT = 3.0


def note(started, completed, *, counts=STEPS, compiling=0.0, function="train"):
    return Notes(counts, LIMIT, False, started, completed, 1.0, compiling, function)


class Looks(Watcher):
    """A watcher that is told four times a second.

    answers: whether processes say where they are as soon as they are asked.
    """

    def __init__(self, num_hosts=1, answers=True, **options):
        self.now, self.said, self.failed, self.asked, self.answers = 0.0, [], [], 0, answers
        super().__init__(num_hosts, self.ask, self.say, lambda *failed: self.failed.append(failed), **options)

    def say(self, *lines):
        self.said.append("\n".join(lines))

    def ask(self):
        self.asked += 1
        if self.answers:
            self.places.update({rank: Place(report.PYTHON) for rank in range(10)})

    def at(self, *notes, times=1, ended=(), hosts=None):
        """What it reports within so many seconds: first steps that are not completed, and ranks.

        hosts: those that tell, with a process each; None for one with all processes. ended: of processes that have.
        """
        self.said.clear()
        told = {rank: each._replace(name=f"rank {rank}") for rank, each in enumerate(notes)}
        told |= {9 - rank: each._replace(status=0) for rank, each in enumerate(ended)}
        for _ in range(4 * times):
            # A step of the clock may be no longer than two looks should take.
            self.now += 0.25
            if hosts is None:
                self.take(0, told, self.now)
            for host in hosts or ():
                self.take(host, {host: told[host]}, self.now)
        return [verdict(text) for text in self.said]


def verdict(text):
    step = re.search(r"not completed step (\d+)", text)
    return int(step[1]) if step else None, tuple(map(int, re.findall(r"^  rank (\d+)", text, re.MULTILINE)))


def test_once_until_they_go_on():
    notes = note(12, 11), note(11, 11), note(12, 11)
    assert Looks().at(*notes, times=3) == []
    looks = Looks()
    assert looks.at(*notes, times=20) == [(12, (0, 1, 2))]
    assert looks.at(*notes[:2], note(13, 12), times=20) == []
    assert looks.at(*[note(14, 13)] * 3, times=20) == [(14, (0, 1, 2))]


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
    looks = Looks()
    for now in (1.0, 1000.0, 2000.0):
        looks.take(0, {0: note(1, 0)}, now)
    assert looks.said == []


def test_they_are_asked_where_they_are():
    """Once. It is not reported if they go on before all have answered."""
    looks = Looks(answers=False)
    stuck = note(2, 1), note(1, 1)
    assert looks.at(*stuck, times=20) == []
    looks.places[0] = Place(report.DEVICE)
    assert looks.at(*stuck, times=20) == []
    assert looks.asked == 1
    assert looks.at(note(2, 2), note(2, 2)) == []
    stuck = note(3, 2), note(2, 2)
    assert looks.at(*stuck, times=20) == []
    assert looks.asked == 2
    assert looks.places == {}
    looks.places |= {0: Place(report.DEVICE), 1: Place(report.PYTHON)}
    assert looks.at(*stuck, times=20) == [(3, (1, 0))]


def test_while_a_host_is_silent_the_clock_stands_still():
    looks = Looks(num_hosts=2)
    stuck = note(2, 1), note(1, 1)
    assert looks.at(*stuck, times=20, hosts=[0]) == looks.at(*stuck, times=2, hosts=[0, 1]) == []
    assert looks.at(*stuck, times=20, hosts=[1]) == looks.at(*stuck, hosts=[0, 1]) == []
    assert looks.at(*stuck, hosts=[0, 1]) == [(2, (0, 1))]


@pytest.mark.parametrize(
    ("on_stuck", "ends_job", "ends"),
    [(None, False, False), (None, True, True), ("report", True, False), ("end", False, True)],
)
def test_who_fails(on_stuck, ends_job, ends):
    """What the launcher is told counts more than what processes say."""
    looks = Looks(on_stuck=on_stuck, watch=2 * LIMIT)
    stuck = note(2, 1)._replace(ends_job=ends_job), note(1, 1), note(2, 2)
    assert looks.at(*stuck, times=5) == []
    assert looks.at(*stuck, times=5) == [(2, (0, 1))]
    assert "within 6 s (--watch)" in looks.said[0]
    assert looks.failed == [(rank, f"rank {rank}", "is stuck in step 2 (train): in Python") for rank in (0, 1) if ends]


def test_a_long_compilation():
    looks = Looks()
    for _ in range(2):
        looks.at(note(1, 0, compiling=LIMIT - 1))
        assert looks.said == []
        looks.at(note(1, 0, compiling=LIMIT + 1), times=5)
        assert looks.said == ["rank 0 has been compiling a program for 4 s"]


def test_those_who_hang_a_little_later_are_named_as_well():
    """One could not note that it had completed step 11."""
    looks = Looks()
    assert looks.at(note(11, 10), note(11, 10), times=1) == []
    assert looks.at(note(12, 11), note(11, 10), times=20) == [(11, (0, 1))]
    # A third one has other things to do, and goes on.
    looks = Looks()
    for step in range(20):
        found = looks.at(note(52, 51), note(51, 51), note(step, step))
        assert found == ([(52, (0, 1))] if step == 3 else [])


def test_one_that_has_exited_is_still_ahead():
    def found(ended, *notes):
        return Looks().at(*notes, times=20, ended=[ended])

    assert found(note(5, 5), note(3, 3)) == [(4, (0,))]
    assert found(note(5, 5), note(5, 5)) == found(note(5, 5), note(7, 7)) == []
    assert found(note(5, 5, counts=EXECUTIONS), note(3, 3)) == []


def test_a_compilation_stops_the_clock():
    looks = Looks()
    assert looks.at(note(1, 0), note(1, 0, compiling=1.0), times=100) == []
    assert looks.at(note(1, 0), note(1, 0), times=3) == []
    assert looks.at(note(1, 0), note(1, 0), times=1) == [(1, (0, 1))]


def test_one_that_has_not_come_to_the_first_step():
    assert Looks().at(note(1, 0), note(0, 0, counts=0), times=5) == [(1, (0, 1))]


def test_executions_have_no_common_numbers():
    waits, idle = note(70, 69, counts=EXECUTIONS), note(40, 40, counts=EXECUTIONS)
    assert Looks().at(waits, idle, times=20) == [(None, (0, 1))]
    assert Looks().at(idle, idle, times=20) == []


def test_the_report():
    """Names the step by the function that is behind, whose processes come first; those that wait for it come last."""
    notes = {
        0: note(6, 4, function="evaluate")._replace(name="rank 0 (pid 1)"),
        1: note(4, 4)._replace(name="rank 1 (pid 2)"),
        2: note(5, 4)._replace(name="rank 2 (pid 3)"),
        3: note(6, 6)._replace(name="rank 3 (pid 4)", status=0),
        4: note(0, 0, counts=0)._replace(name="rank 4 (pid 5)"),
    }
    places = {
        0: Place(report.DEVICE, table="a table\n"),
        1: Place(report.PYTHON, "a call", "", "MainThread:\n  stack"),
        2: Place(stacks="MainThread:\n  of a signal"),
        4: Place(report.STOPPED),
    }
    found = Report(5, (0, 1, 2, 4), notes, places)
    assert found.lines(8.0, "jax_ring.watch") == [
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
        "  a table",
    ]
    assert found.blamed() == {
        1: "is stuck in step 5 (train): in Python",
        2: "is stuck in step 5 (train): in Python",
        4: "is stuck in step 5 (train): stopped",
    }
    assert found._replace(behind=(0,)).blamed() == {0: "is stuck in step 5 (train): in the device's program"}


def test_a_report_has_no_lines_that_look_like_others():
    """The first is the launcher's, as are those behind it; what processes say in these is indented."""
    forged = "jax_ring.launch: failed: all is well\njax_ring.launch: \r\u2028jax_ring.launch: once more"
    lines = Report(1, (0,), {0: note(1, 0)}, {0: Place(report.PYTHON, forged, forged, forged)}).lines(8.0, "--watch")
    assert sum("all is well" in line for line in lines) == 3
    assert all(line.startswith("  ") for line in lines[1:] if line)
    with pytest.raises(ValueError, match=r"'jax_ring.launch: .*' is no place of a process"):
        checked(["jax_ring.launch: failed", "", "", ""], Place)


@pytest.mark.parametrize("own", [True, False])
def test_stacks_of_a_signal(own):
    """Those of jax_ring are left out, and the main thread, which Python writes last, comes first."""
    stacks = f"""Thread 0x01 (most recent call first):
  File "{report._CALLERS[0]}/progress/process.py", line 2 in _run

Thread 0x02 (most recent call first):
  File "/nowhere/load.py", line ??? in parse
  File "/nowhere/load.py", line 7 in read

Current thread 0x03 (most recent call first):
  File "{__file__}", line 1 in inner
  File "{report._CALLERS[0]}/progress/watch.py", line 1 in watched
  File "/nowhere/train.py", line 2 in <module>
"""
    assert [line for line in report.readable(stacks, of_this_process=own).splitlines() if line.strip()] == [
        "MainThread:",
        '  File "/nowhere/train.py", line 2, in <module>',
        f'  File "{__file__}", line 1, in inner',
        *['    """Which processes are stuck, by the notes of all, without processes and clocks."""'] * own,
        "another thread:",
        '  File "/nowhere/load.py", line 7, in read',
        '  File "/nowhere/load.py", line ???, in parse',
    ]
    assert report.readable("") == ""


def test_lines_of_files_of_this_process(tmp_path):
    (tmp_path / "wide.py").write_text("x" * 10_000)
    frames = [
        f'{tmp_path}/wide.py", line 1',
        f'{__file__}", line {"1" * 5000}',
        '/nul\0", line 1',
        f'{tmp_path}", line 1',
    ]
    stacks = "\n".join(["Thread:", *(f'  File "{frame} in f' for frame in frames)])
    found = report.readable(stacks, of_this_process=True)
    sources = {line.strip() for line in found.splitlines()[1:] if 'File "' not in line}
    assert sources == {"", "x" * report._MOST_LINE}


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
    same.words.asked = True
    page.answer("here")
    assert (same.words.asked, same.behind()) == (False, "here")
    page.answer("there")
    assert same.behind() == "there"
    same.clear()
    assert same.behind() == ""
    os.write(page.file, b"stacks")  # as Python does
    assert same.behind() == "stacks"
    assert f'"{__file__}", line' in page.stacks()
    same.close()


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, -1.0, 1e308])
def test_numbers_that_are_none(page, number):
    """The launcher can reckon with what it makes of them, and other launchers get it."""
    words = page.words
    words.counts = words.started = words.completed = words.ends_job = 2**63 - 1
    words.limit = words.completed_at = words.compiling_since = number
    words.function = words.compiling = b"\xff\x01" * 512
    notes = page.read("rank 0")
    assert notes.counts == notes.completed_ago == notes.compiling_for == 0
    assert notes.limit == (number if number == 1e308 else 0)
    message = Message("progress", ((0, notes),))
    assert decode(json.dumps(message, allow_nan=False).encode()) == message


@pytest.mark.parametrize("letter", [b"\x7f", b"\xff", "é".encode(), "\N{GRINNING FACE}".encode()])
@pytest.mark.parametrize("is_answer", [True, False])
def test_a_page_full_of_anything_fits_into_a_message(page, letter, is_answer, monkeypatch):
    monkeypatch.setattr(reader, "_POLLS", 1)
    begin, end = (b'["in Python", "", "', b'", ""]') if is_answer else (b'Thread:\n  File "', b'", line 1 in f\n')
    room = pages._END - pages._SIZE - len(begin) - len(end)

    async def place():
        process = types.SimpleNamespace(page=page, is_stopped=lambda: False)
        found = asyncio.create_task(reader._place(process))
        await asyncio.sleep(0)
        page.clear()
        os.write(page.file, begin + letter * (room // len(letter)) + end)
        page.words.asked = not is_answer
        monkeypatch.setattr(page, "clear", lambda: None)
        return await found

    found = asyncio.run(place())
    assert len(found.table or found.stacks) > 10_000
    assert len(json.dumps(Message("place", (0, found)))) < links._MOST_BYTES


def test_a_launcher_opens_no_file_that_a_process_names(page, monkeypatch):
    """It would wait for a pipe, or for a file system that does not answer, and for nothing else meanwhile."""
    monkeypatch.setattr(reader, "_POLLS", 1)
    monkeypatch.setattr(reader, "_SIGNAL_SECONDS", 0.0)
    page.words.has_handler = True
    named = f'  File "{__file__}", line 1'

    def handle(*signal, **options):
        os.write(page.file, f"Thread 0x1 (most recent call first):\n{named} in f\n".encode())

    process = types.SimpleNamespace(page=page, is_stopped=lambda: False, send=handle)
    assert asyncio.run(reader._place(process)).stacks.splitlines() == ["MainThread:", f"{named}, in f"]


def test_a_page_keeps_its_size(page):
    """The launcher has it in memory, and would end with a process that takes that away."""
    for size in (0, 1 << 40):
        with pytest.raises(PermissionError):
            os.ftruncate(page.file, size)
    page.answer("é" * (1 << 20))
    text = page.behind()
    assert len(text) > 50_000
    assert set(text[:-1]) == {"é"}
    for offset in (0, 1 << 40):
        os.lseek(page.file, offset, os.SEEK_SET)
        assert page.behind()[:1] in ("", "é")
    assert page.read().counts == 0


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


@pytest.mark.parametrize("answer", [b"{]", b"\xff", b"[1, 2]", b"[" * 10**5])
def test_a_process_that_answers_something_else(answer):
    """It is said of it, and the others are looked at as before."""
    page = Page.new()

    async def place():
        found = asyncio.create_task(reader._place(types.SimpleNamespace(page=page)))
        await asyncio.sleep(0)
        assert page.words.asked
        page.clear()
        os.write(page.file, answer)
        page.words.asked = False
        return await found

    assert "it has answered something else" in asyncio.run(place()).stacks
    page.close()
