"""The secret of a job: how two launchers prove that they have it, and where they and their processes get it from."""

import asyncio
import contextlib
import fcntl
import os
import pathlib
import socket

import pytest
from launches import run, start

from jax_ring.launcher import arguments, environment, protocol
from jax_ring.launcher.hosts import secret

pytestmark = pytest.mark.one_pair  # the launcher is Python's

SECRET, OTHER = b"what only they know", b"what others know"


async def opened():
    """Both ends of a connection, as a reader and a writer."""
    return [await asyncio.open_connection(sock=each) for each in socket.socketpair()]


def proved(listener, connector):
    """What both ends get that have these secrets."""

    async def scenario():
        ends = await opened()
        proofs = [
            secret.prove(*ends[0], listener, listens=True), secret.prove(*ends[1], connector, listens=False)
        ]  # fmt: skip
        async with asyncio.timeout(20):
            found = await asyncio.gather(*proofs, return_exceptions=True)
        for _, writer in ends:
            writer.close()
        return found

    return asyncio.run(scenario())


def test_two_launchers_with_one_secret_have_the_same_keys_once():
    first, second = proved(SECRET, SECRET), proved(SECRET, SECRET)
    assert first[0] == first[1][::-1]
    assert len({*first[0], *second[0]}) == 4


def test_without_a_secret_connections_have_keys_as_well():
    first, second = proved(b"", b"")
    assert first == second[::-1]


@pytest.mark.parametrize(
    ("secrets", "texts"),
    [
        ((SECRET, OTHER), ["has another secret than this one (JAX_RING_SECRET, or --secret-file)"] * 2),
        (
            (SECRET, b""),
            ["was started with --insecure, and this one has a secret", "has a secret, and this one was st"],
        ),
        (
            (b"", SECRET),
            ["has a secret, and this one was started w", "was started with --insecure, and this one has a"],
        ),
    ],
)
def test_both_say_what_is_wrong_with_the_other(secrets, texts):
    for error, text in zip(proved(*secrets), texts, strict=True):
        assert isinstance(error, secret.OtherSecretError)
        assert str(error).startswith(text)
        assert "give all launchers of a job the same" in str(error)


async def passed_on(reader, writer):
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 10):
            writer.write(data)
    writer.close()


@pytest.mark.parametrize("listens", [True, False])
def test_what_one_launcher_says_proves_nothing_to_one_that_plays_the_same_part(listens):
    """A stranger between them passes on what they say."""

    async def scenario():
        (a, to_a), (b, to_b) = await opened(), await opened()
        passing = [asyncio.create_task(passed_on(*way)) for way in ((to_a[0], to_b[1]), (to_b[0], to_a[1]))]
        proving = [asyncio.create_task(secret.prove(*end, SECRET, listens=listens)) for end in (a, b)]
        await asyncio.wait(proving, timeout=1)  # two that listen wait for each other
        for _, writer in (a, b):
            writer.close()
        found = await asyncio.gather(*proving, return_exceptions=True)
        await asyncio.gather(*passing)
        return found

    assert all(isinstance(each, ConnectionError) for each in asyncio.run(scenario()))


@pytest.mark.parametrize("listens", [True, False])
def test_an_echo_proves_nothing(listens):
    async def scenario():
        own, echo = await opened()
        echoing = asyncio.create_task(passed_on(*echo))
        try:
            async with asyncio.timeout(1):  # one that listens waits for a proof
                return await secret.prove(*own, SECRET, listens=listens)
        finally:
            own[1].close()
            await echoing

    with pytest.raises(TimeoutError if listens else secret.OtherSecretError):
        asyncio.run(scenario())


def test_a_stranger_gets_nothing_of_the_secret_from_one_who_listens():
    """Not even what would show whether a guess is right."""

    async def scenario():
        own, (reader, writer) = await opened()
        proving = asyncio.create_task(secret.prove(*own, SECRET, listens=True))
        writer.write(b"jaxring1s" + bytes(64))
        greeting, answer = await reader.readexactly(41), await reader.readexactly(32)
        with pytest.raises(secret.OtherSecretError):
            await proving
        for each in (own[1], writer):
            each.close()
        return greeting, answer

    greeting, answer = asyncio.run(scenario())
    assert greeting[:9] == b"jaxring1s"
    assert answer == bytes(32)


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01", b'["answer", [], 0]\n', bytes(99)]
)
def test_what_is_no_launcher_is_said(data):
    async def scenario():
        own, (_, writer) = await opened()
        writer.write(data)
        try:
            await secret.prove(*own, SECRET, listens=True)
        finally:
            for each in (own[1], writer):
                each.close()

    with pytest.raises(ValueError, match="is no greeting of a launcher of this version"):
        asyncio.run(scenario())


def test_one_that_goes_is_gone():
    async def scenario():
        own, (_, writer) = await opened()
        writer.write(b"jaxring1s")
        writer.close()
        try:
            await secret.prove(*own, SECRET, listens=True)
        finally:
            own[1].close()

    with pytest.raises(ConnectionError):
        asyncio.run(scenario())


# ---- Where it is from ------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "the secret"
    path.write_bytes(b" " + SECRET + b"\n")
    path.chmod(0o600)
    return path


def test_a_file_of_this_user_alone(file):
    assert secret.of_file(file) == SECRET
    file.chmod(0o400)
    assert secret.of_file(file) == SECRET


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o611])
def test_a_file_that_others_may_use(file, mode):
    file.chmod(mode)
    with pytest.raises(ValueError, match=rf"the secret has mode {mode:04o}, so that others may use it: chmod 600 /"):
        secret.of_file(file)


def test_what_is_no_file_of_this_user(file, tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(file)
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "folder").mkdir(mode=0o700)
    for name, text in {
        "link": "it is a link; give the file itself", "pipe": "pipe is no regular file", "absent": "No such file",
        "folder": "folder is no regular file",
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=text):
            secret.of_file(tmp_path / name)
    monkeypatch.setattr(secret.os, "geteuid", lambda: file.stat().st_uid + 1)
    with pytest.raises(ValueError, match=rf"belongs to user {file.stat().st_uid}, and this is user "):
        secret.of_file(file)


HOSTS = ["-n", "1", "--nnodes", "2", "--coordinator", "127.0.0.1:1"]


def parsed(*options):
    return arguments.parse([*options, __file__], "").secret


def test_the_variable_and_the_file(file, monkeypatch):
    """Processes do not inherit the variable."""
    monkeypatch.setenv("JAX_RING_SECRET", " 0123456789abcdef\n")
    assert parsed(*HOSTS) == b"0123456789abcdef"
    assert "JAX_RING_SECRET" not in os.environ
    monkeypatch.setenv("JAX_RING_SECRET", "0123456789abcdef")
    assert parsed(*HOSTS, "--secret-file", str(file)) == SECRET
    assert "JAX_RING_SECRET" not in os.environ
    assert parsed(*HOSTS, "--insecure") == b""
    alone = [parsed("-n", "1") for _ in range(2)]
    assert len(set(alone)) == 2
    assert {len(each) for each in alone} == {32}
    assert repr(SECRET) not in repr(arguments.Options((), secret=SECRET))


@pytest.mark.parametrize(
    ("options", "variable", "text"),
    [
        (HOSTS, None, "--nnodes 2 needs a secret that the launchers of all hosts have: set JAX_RING_SECRET, or give "),
        (HOSTS, "0123456789abcde", "the secret of JAX_RING_SECRET has 15 characters, and at least 16 are needed"),
        (HOSTS, "", "the secret of JAX_RING_SECRET has 0 characters"),
        (["-n", "1"], "short", "the secret of JAX_RING_SECRET has 5 characters"),
        ([*HOSTS, "--secret-file", "/absent"], None, "cannot read /absent: No such file or directory"),
        ([*HOSTS, "--insecure"], "0123456789abcdef", "--insecure is for several hosts, and not beside JAX_RING_SECRET"),
        ([*HOSTS, "--insecure", "--secret-file", "a"], None, "several hosts, and not beside --secret-file"),
        (["-n", "1", "--insecure"], None, "--insecure is for several hosts"),
        (["-n", "1", "--nnodes", "2", "--coordinator", "a..b:1"], None, "--coordinator: 'a..b' is no name of a host"),
        (["-n", "1", "--nnodes", "2", "--coordinator", 64 * "a" + ":1"], None, "a' is no name of a host: "),
    ],
)
def test_what_is_refused(options, variable, text, monkeypatch, capsys):
    monkeypatch.delenv("JAX_RING_SECRET", raising=False)
    if variable is not None:
        monkeypatch.setenv("JAX_RING_SECRET", variable)
    with pytest.raises(SystemExit):
        parsed(*options)
    assert text in capsys.readouterr().err


def test_processes_have_a_key_and_not_the_secret(script, secret):
    """In a file that nobody can change. Programs that they start have neither."""
    path = script(
        f"""
import os, pathlib, runpy, subprocess, sys
own_key = runpy.run_path({protocol.__file__!r})["own_key"]
print("key", own_key().hex())
for shows in ("environ", "cmdline"):
    assert {secret!r}.encode() not in pathlib.Path(f"/proc/self/{{shows}}").read_bytes()
assert {secret!r} not in str(os.environ)
program = "import runpy; print('none', runpy.run_path({protocol.__file__!r})['own_key']())"
print(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.strip())
"""
    )
    status, out, err = run("-n", "2", path)
    assert status == 0, err
    key = protocol.key_of_job(secret.encode()).hex()
    assert out == [f"[{rank}] {text}" for rank in range(2) for text in (f"key {key}", "none b''")]


def test_other_children_of_the_launcher_have_no_secret(script, secret):
    """The coordination service, and what removes the folder of its socket."""
    path = script(
        """
import os, pathlib
found = []
for child in pathlib.Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read_text().split():
    found.append(pathlib.Path(f"/proc/{child}/environ").read_bytes())
print(len(found), any(b"JAX_RING_SECRET" in each for each in found))
"""
    )
    status, out, err = run("-n", "1", path)
    assert (status, out) == (0, ["[0] 3 False"]), err


def test_nobody_changes_the_file_of_a_key():
    file = environment.key_file(b"key")
    try:
        for change in (lambda: os.write(file, b"x"), lambda: os.ftruncate(file, 0), lambda: os.ftruncate(file, 9)):
            with pytest.raises(PermissionError):
                change()
        with pytest.raises(PermissionError):
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    finally:
        os.close(file)


def test_no_argument_shows_the_secret(script, file):
    launcher = start(
        "-n", "1", "--secret-file", str(file), script("import time; print('here', flush=True); time.sleep(60)")
    )
    try:
        assert launcher.stdout.readline() == "[0] here\n"
        shown = pathlib.Path(f"/proc/{launcher.pid}/cmdline").read_bytes()
        assert SECRET not in shown
        assert str(file).encode() in shown
    finally:
        launcher.terminate()
        launcher.communicate()
