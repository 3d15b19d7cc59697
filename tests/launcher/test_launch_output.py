"""The launcher's output: a reader that blocks, one that is slow, progress bars, log files."""

import concurrent.futures
import os
import pathlib
import signal
import subprocess
import threading

import pytest
from launches import COMMAND, run

from jax_ring.launcher import output
from jax_ring.launcher.output import LogFiles

pytestmark = pytest.mark.one_pair  # the launcher is Python's

TIMEOUT_S = 60  # of what should take a second


def start_bytes(*arguments):
    return subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def write(tmp_path, text):
    path = tmp_path / "script.py"
    path.write_text(text)
    return str(path)


def test_a_full_pipe_does_not_keep_the_launcher_from_ending(tmp_path):
    """Its reader reads one byte, and no more: the pipe is full long before the signal comes."""
    marker = tmp_path / "stuck"
    path = write(
        tmp_path,
        f"""
import signal, threading, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
written = 0
def watch():
    last = -1
    while written == 0 or last != written:
        last = written
        time.sleep(0.3)
    open({str(marker)!r}, "w")
threading.Thread(target=watch).start()
while True:
    print("x" * 10000)
    written += 1
""",
    )
    launcher = start_bytes("-n", "1", "--grace", "0.2", path)
    try:
        launcher.stdout.read(1)
        for _ in range(TIMEOUT_S * 10):
            if marker.exists():
                break
            with pytest.raises(subprocess.TimeoutExpired):
                launcher.wait(0.1)
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(TIMEOUT_S) == 128 + signal.SIGTERM
        err = launcher.stderr.read().decode()
        assert "received SIGTERM; sending SIGTERM to ranks 0" in err
        assert "killing ranks 0" in err
    finally:
        launcher.kill()
        launcher.communicate()


def test_a_slow_reader_gets_everything(tmp_path):
    """More than the pipes and the launcher hold; the processes have to wait for the reader, and succeed."""
    path = write(tmp_path, "for i in range(4000): print('x' * 1000, i)")
    launcher = start_bytes("-n", "2", path)
    with pytest.raises(subprocess.TimeoutExpired):
        launcher.wait(2)
    out, err = launcher.communicate(timeout=TIMEOUT_S)
    assert launcher.returncode == 0, err
    lines = sorted(out.decode().splitlines())
    assert lines == sorted(f"[{rank}] {'x' * 1000} {i}" for rank in range(2) for i in range(4000))


def test_progress_bars_appear_before_the_newline(tmp_path):
    path = write(tmp_path, "import sys, time\nsys.stdout.write('\\r 10%\\r 20%'); sys.stdout.flush(); time.sleep(60)")
    launcher = start_bytes("-n", "1", path)
    try:
        seen = b""
        while b"20%" not in seen:
            seen += os.read(launcher.stdout.fileno(), 100)
        assert seen == b"[0]  10%\r[0]  20%\r"
    finally:
        launcher.terminate()
        launcher.communicate(timeout=TIMEOUT_S)


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        (["one\ntwo\n"], ["one\n", "two\n"]),
        (["o", "ne", "\n", "tw", "o"], ["one\n", "end", "two\n"]),
        (["\n\n"], ["\n", "\n"]),
        (["one\r\ntwo\r", "\n"], ["one\n", "two\n"]),
        (["\r 1%", "\r 2%", "\r 3%\n"], [" 1%\r", " 2%\r", " 3%\n"]),
        (["\r 1%", "pause", "\r 2%", "pause", "\ndone\n"], [" 1%\r", " 2%\r", " 2%\n", "done\n"]),
        ([" 1%\r", "pause", " 2%\r", "\nnext\n"], [" 1%\r", " 2%\n", "next\n"]),
        ([" 1%\r 2%\r", "pause", "pause"], [" 1%\r", " 2%\r", "end", " 2%\n"]),
        (["no bar", "pause", " so far\n"], ["no bar so far\n"]),
    ],
)
def test_lines_and_states_of_progress_bars(chunks, expected):
    lines, found = output.Lines(), []
    for chunk in chunks:
        pieces = (lines.pause() if lines.is_waiting() else ()) if chunk == "pause" else lines.feed(chunk.encode())
        found += [(piece + end).decode() for piece, end in pieces]
    if rest := [(piece + end).decode() for piece, end in lines.end()]:
        found += ["end", *rest]
    assert found == expected


@pytest.mark.parametrize("rest", [1, 10])
def test_a_long_line_comes_in_pieces(monkeypatch, rest):
    monkeypatch.setattr(output, "_LINE_BYTES", 100)
    lines, found = output.Lines(), []
    for chunk in [*10 * [10 * b"x"], rest * b"x", 100 * b"y", b"\nnext\n" + 101 * b"z"]:
        found += lines.feed(chunk)
        assert len(lines._partial) <= 100
    pieces = [100 * b"x", rest * b"x" + (100 - rest) * b"y", rest * b"y", b"next", 100 * b"z"]
    assert found == [(piece, b"\n") for piece in pieces]
    assert list(lines.end()) == [(b"z", b"\n")]


def test_log_files(tmp_path):
    path = write(tmp_path, "import os, sys\nprint('to out'); print('to err', file=sys.stderr); sys.exit(3)")
    status, out, _ = run("-n", "2", "--log-dir", str(tmp_path / "logs"), "--max-restarts", "1", "--backoff", "0", path)
    assert status == 3
    assert {"[0] to out", "[1] to out"} & {*out}
    for folder in (tmp_path / "logs", tmp_path / "logs" / "restart-1"):
        # The other process may have been ended before it wrote.
        texts = {file.name: file.read_text() for file in folder.glob("rank-*")}
        assert set(texts) == {"rank-0.out", "rank-0.err", "rank-1.out", "rank-1.err"}
        assert "to out\n" in texts.values()
        assert "to err\n" in texts.values()
    with pytest.raises(OSError, match=r"^cannot write to --log-dir: .*File exists"):
        LogFiles(pathlib.Path(path), print).of("job", 0, 0)


def texts_in(folder):
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("rank-*")}


def test_a_later_job_has_log_files_of_its_own(tmp_path):
    path, logs = write(tmp_path, "import sys; print(sys.argv[1]); sys.exit(int(sys.argv[2]))"), tmp_path / "logs"
    arguments = ["-n", "1", "--log-dir", str(logs), "--max-restarts", "1", "--backoff", "0", path]
    assert run(*arguments, "first", "3")[0] == 3
    first = texts_in(logs)
    assert set(first) == {f"{folder}rank-0.{end}" for folder in ("", "restart-1/") for end in ("out", "err")}
    for job in (2, 3):
        assert run(*arguments, "later", "0")[0] == 0
        assert texts_in(logs / f"job-{job}") == {"rank-0.out": "later\n", "rank-0.err": ""}
    assert {name: text for name, text in texts_in(logs).items() if "job" not in name} == first


def claim(folder, job, restart=0, rank=0, text=""):
    """What a launcher of a job tells, that writes this to the file of a rank."""
    told = []
    out, err = LogFiles(folder, told.append).of(job, restart, rank)
    os.write(out, text.encode())
    os.close(out)
    os.close(err)
    return told


def test_launchers_of_one_job_share_a_folder(tmp_path):
    assert claim(tmp_path, "one", 0, 0, "a") == []
    told = [f"the output of this job is in {tmp_path}/job-2: {tmp_path} has that of an earlier one"]
    assert claim(tmp_path, "two", 0, 0, "b") == told
    assert claim(tmp_path, "one", 0, 1, "c") == []
    assert claim(tmp_path, "two", 1, 3, "d") == told
    assert claim(tmp_path, "one", 0, 1, "e") == []  # a launcher that was started again
    outputs = {name: text for name, text in texts_in(tmp_path).items() if name.endswith(".out")}
    of_second = {"job-2/rank-0.out": "b", "job-2/restart-1/rank-3.out": "d"}
    assert outputs == {"rank-0.out": "a", "rank-1.out": "ce"} | of_second


def test_log_files_of_a_job_that_has_left_no_name(tmp_path):
    (tmp_path / "rank-2.out").write_text("old")
    claim(tmp_path, "one", rank=2, text="new")
    assert texts_in(tmp_path) == {"rank-2.out": "old", "job-2/rank-2.out": "new", "job-2/rank-2.err": ""}


def test_launchers_that_claim_a_folder_at_once(tmp_path):
    """Of four jobs with two launchers each, every job gets one folder, and no other gets that."""
    launchers = [(job, rank) for job in "abcd" for rank in range(2)]
    together = threading.Barrier(len(launchers))

    def write(attempt, job, rank):
        together.wait()
        claim(tmp_path / str(attempt), job, rank=rank, text=job)

    with concurrent.futures.ThreadPoolExecutor(len(launchers)) as pool:
        for attempt in range(50):
            list(pool.map(lambda launcher, attempt=attempt: write(attempt, *launcher), launchers))
            texts = texts_in(tmp_path / str(attempt))
            folders = [name.removesuffix("rank-0.out") for name in texts if name.endswith("rank-0.out")]
            pairs = [[texts[f"{folder}rank-{rank}.out"] for rank in range(2)] for folder in folders]
            assert sorted(pairs) == [["a"] * 2, ["b"] * 2, ["c"] * 2, ["d"] * 2]


OTHER_USER = 12345


def refusal(folder):
    """Why --log-dir is refused."""
    with pytest.raises(OSError, match=r"^cannot write to --log-dir: ") as error:
        LogFiles(folder, print).of("job", 0, 0)
    return str(error.value)


def test_log_files_follow_no_link(tmp_path):
    folder, other = tmp_path / "logs", tmp_path / "other"
    claim(folder, "job", rank=1)
    other.write_text("of another program\n")
    (folder / "rank-0.out").symlink_to(other)
    assert f"{folder}/rank-0.out is a link" in refusal(folder)
    assert other.read_text() == "of another program\n"


def test_no_file_stays_open_when_the_next_one_is_refused(tmp_path):
    claim(tmp_path, "job", rank=1)
    (tmp_path / "rank-0.err").symlink_to(tmp_path / "other")
    before = os.listdir("/proc/self/fd")
    assert "rank-0.err is a link" in refusal(tmp_path)
    assert os.listdir("/proc/self/fd") == before


def test_a_pipe_in_place_of_a_log_file(tmp_path):
    """It does not hold the launcher up, with or without a reader."""
    claim(tmp_path, "job", rank=1)
    os.mkfifo(tmp_path / "rank-0.out")
    refusal(tmp_path)
    reader = os.open(tmp_path / "rank-0.out", os.O_RDONLY | os.O_NONBLOCK)
    assert "is of another user, or no file" in refusal(tmp_path)
    os.close(reader)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make files of other users")
def test_log_files_in_reach_of_another_user(tmp_path):
    of_other, of_root, own, link = (tmp_path / name for name in ("of_other", "of_root", "own", "link"))
    for folder in (of_other, of_root, own):
        folder.mkdir()
    link.symlink_to(own)
    claim(link, "job", text="a")
    os.chown(link, OTHER_USER, OTHER_USER, follow_symlinks=False)
    assert f"{link} is of another user" in refusal(link)
    os.chown(of_other, OTHER_USER, OTHER_USER)
    for mode in (0o755, 0o775, 0o777, 0o1777):  # its owner may put a link in its place
        of_other.chmod(mode)
        assert f"{of_other} is of another user" in refusal(of_other)
    of_root.chmod(0o1777)
    claim(of_root, "job", rank=1)
    (of_root / "rank-0.out").write_text("")
    os.chown(of_root / "rank-0.out", OTHER_USER, OTHER_USER)
    assert f"{of_root}/rank-0.out is of another user" in refusal(of_root)


def test_log_files_are_closed_when_a_process_has_ended(tmp_path):
    """Each restart finds as many files open in the launcher as the one before."""
    folder = tmp_path / "logs"
    path = write(tmp_path, "import os, sys; print(len(os.listdir(f'/proc/{os.getppid()}/fd'))); sys.exit(3)")
    run("-n", "1", "--log-dir", str(folder), "--max-restarts", "9", "--backoff", "0", path)
    counts = [int((folder / f"restart-{restart}" / "rank-0.out").read_text()) for restart in range(1, 10)]
    assert max(counts) < min(counts) + 10, counts


def test_too_few_files(tmp_path):
    command = ["sh", "-c", 'ulimit -n 20; exec "$@"', "sh", *COMMAND, "-n", "20", write(tmp_path, "")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert result.returncode == 1, result.stderr
    assert result.stderr == (
        "jax_ring.launch: failed: 20 processes cannot be started: [Errno 24] Too many open files: "
        "raise the limit of open files (ulimit -n), or start fewer processes (-n)\n"
    )


@pytest.mark.parametrize(("ends", "status"), [("", 120), ("import sys; sys.exit(3)", 3)])
@pytest.mark.parametrize("redirection", [">/dev/full", "2>/dev/full"])
def test_a_full_disk_is_no_success(tmp_path, ends, status, redirection):
    """The status is that of Python."""
    path = write(tmp_path, f"import sys; print('lost'); print('lost', file=sys.stderr)\n{ends}")
    command = ["sh", "-c", f'exec "$@" {redirection}', "sh", *COMMAND, "-n", "1", path]
    result = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, check=False)
    assert result.returncode == status, result.stderr


def test_without_standard_output(tmp_path):
    path = write(tmp_path, "print('nobody reads this')")
    command = ["sh", "-c", 'exec "$@" >&-', "sh", *COMMAND, "-n", "1", path]
    result = subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make files of other users")
def test_log_files_in_reach_of_a_user_that_the_namespace_does_not_have(script, tmp_path):
    """He looks like the host's root there, if that has none either."""
    namespace = ["unshare", "--user", "--map-root-user"]
    if subprocess.run([*namespace, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this system does not let users make namespaces")
    logs = tmp_path / "logs"
    logs.mkdir()
    logs.chmod(0o1777)  # as /tmp
    os.chown(logs, OTHER_USER, OTHER_USER)
    command = [*namespace, *COMMAND, "-n", "1", "--log-dir", str(logs), script("")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert f"cannot write to --log-dir: {logs} is of another user" in result.stderr
    assert not [*logs.iterdir()]
