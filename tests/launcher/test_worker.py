"""The program that a process runs finds what it would find under Python."""

import os
import pathlib
import py_compile
import socket
import subprocess
import sys
import time
import zipfile

import pytest
from launches import run

from jax_ring.launcher import protocol, worker
from jax_ring.launcher.coordinator.folder import SocketFolder
from jax_ring.launcher.environment import reserved_address

PROGRAM = """
import atexit, os, pickle, sys
class Kept: pass
@atexit.register
def at_exit():
    print(type(pickle.loads(pickle.dumps(Kept()))))
def names(): return sorted(vars(sys.modules["__main__"]))
os.chdir("/")
print(__name__, __file__, __package__, __spec__ and __spec__.name, type(__builtins__), sys.argv)
print(names(), sys.path[0])
"""


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """One program in each form that Python takes."""
    monkeypatch.chdir(tmp_path)
    pathlib.Path("script.py").write_text(PROGRAM)
    py_compile.compile("script.py", "compiled.pyc")
    os.symlink("folder/__main__.py", "link.py")
    for folder in ("folder", "package"):
        pathlib.Path(folder).mkdir()
        pathlib.Path(folder, "__main__.py").write_text(PROGRAM)
    pathlib.Path("package", "__init__.py").touch()
    with zipfile.ZipFile("archive.zip", "w") as archive:
        archive.write("script.py", "__main__.py")


# Runs a script as the launcher does, which names the files that it passes on: one is there.
OF_LAUNCHER = ["-P", worker.__file__, str(os.getpid()), "0"]


def output_of(*arguments):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    result = subprocess.run(
        [sys.executable, *arguments, "-x", "y"],
        capture_output=True, text=True, env=environment, timeout=120, check=False,
    )  # fmt: skip
    return result.returncode, result.stdout, result.stderr


@pytest.mark.parametrize(
    "program", ["script.py", "link.py", "compiled.pyc", "folder", "archive.zip", "-m script", "-m package", "absent.py"]
)
def test_as_under_python(programs, program):
    *option, name = program.split()
    found = output_of("-P", worker.__file__, "alone", "module" if option else "script", name)
    assert found == output_of(*option, name)


def test_the_launcher_takes_a_folder(programs):
    status, out, err = run("-n", "1", "folder")
    assert status == 0, err
    assert any(line.startswith("[0] __main__ ") for line in out)


@pytest.mark.parametrize("imported_by", ["script.py", "sitecustomize.py"])
def test_initialize_is_replaced_whoever_imports_jax(script, tmp_path, imported_by):
    script("", "script.py")
    (tmp_path / "jax").mkdir()  # in place of JAX
    script("import jax.distributed", "jax/__init__.py")
    script("def initialize(): pass\ndef shutdown(): pass", "jax/distributed.py")
    script("import jax", imported_by)
    with open(tmp_path / "script.py", "a") as file:
        file.write("\nimport jax; print(hasattr(jax.distributed.initialize, '__wrapped__'))")
    result = subprocess.run(
        [sys.executable, *OF_LAUNCHER, "script", str(tmp_path / "script.py")],
        capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(tmp_path)}, timeout=120, check=False,
    )  # fmt: skip
    assert result.stdout == "True\n", result.stderr


# In place of JAX: what a call of initialize gets, whether process 0 would start a service, and where Gloo listens.
IN_PLACE_OF_JAX = {
    "__init__.py": "import types; config = types.SimpleNamespace(jax_mtls_cert_file={in_config!r})",
    "_src/__init__.py": "",
    "_src/distributed.py": """
import types
_jax = types.SimpleNamespace(get_distributed_runtime_service=int, make_gloo_tcp_collectives=dict)
""",
    "distributed.py": """
import os
from jax._src import distributed
def initialize(*args, **options):
    is_service = distributed._jax.get_distributed_runtime_service(1) is not None
    print(args, options, is_service, *distributed._jax.make_gloo_tcp_collectives().values())
def shutdown(): pass
""",
}


@pytest.fixture
def initialize(script, tmp_path):
    """Runs a script in a process of the launcher, under variables of it; returns what it writes."""

    def run(text, in_config=None, **own):
        (tmp_path / "jax" / "_src").mkdir(parents=True)
        for name, code in IN_PLACE_OF_JAX.items():
            script(code.format(in_config=in_config) if name == "__init__.py" else code, f"jax/{name}")
        own = {"JAX_NUM_PROCESSES": "3", "JAX_PROCESS_ID": "1", "PYTHONPATH": str(tmp_path), **own}
        result = subprocess.run(
            [sys.executable, *OF_LAUNCHER, "script", script(text)],
            capture_output=True, text=True, env=os.environ | own, timeout=120, check=False,
        )  # fmt: skip
        return result.stdout.removesuffix("\n") or result.stderr

    return run


OTHER = "127.0.0.1:2"
GIVEN = "(None, 3, 1) {} False 127.0.0.1"


@pytest.mark.parametrize(
    ("change", "arguments", "expected"),
    [
        ("", "", GIVEN),
        ("", "''", GIVEN.replace("None", "''")),
        ("", "os.environ['JAX_COORDINATOR_ADDRESS']", GIVEN.replace("None", "'127.0.0.1:1'")),
        ("", "initialization_timeout=5", GIVEN.replace("{}", "{'initialization_timeout': 5}")),
        ("", f"'{OTHER}'", f"('{OTHER}', 3, 1) {{}} True"),
        ("", f"'{OTHER}', 4, 0, [0], 'mpi4py'", f"('{OTHER}', 4, 0, [0], 'mpi4py') {{}} True"),
        ("", f"num_processes=4, coordinator_address='{OTHER}'", f"('{OTHER}', 4, 1) {{}} True"),
        ("'JAX_COORDINATOR_ADDRESS': OTHER", "", "(None, 3, 1) {} True"),
        ("'JAX_NUM_PROCESSES': '7', 'JAX_PROCESS_ID': '6'", "", GIVEN),
        ("", f"'{OTHER}', process_id=0", f"('{OTHER}', 3, 0) {{}} True"),
    ],
)
def test_what_initialize_gets(initialize, change, arguments, expected):
    text = f"import os, jax.distributed\nOTHER = {OTHER!r}\nos.environ.update({{{change}}})\n"
    text += f"jax.distributed.initialize({arguments})"
    assert initialize(text, JAX_COORDINATOR_ADDRESS="127.0.0.1:1") == expected


@pytest.mark.parametrize(
    ("coordinator", "hosts"),
    [
        ("unix:/tmp/a/coordinator-1", "127.0.0.1"),
        ("127.0.1.1:5", "127.0.0.1"),
        ("[::1]:5", "127.0.0.1"),
        ("10.0.0.1:5", ""),
        ("node-127:5", ""),
        ("[fd00::1]:5", ""),
    ],
)
def test_gloo_stays_on_a_host_that_has_all_processes(initialize, coordinator, hosts):
    text = "import jax.distributed\njax.distributed.initialize()"
    expected = f"(None, 3, 1) {{}} False {hosts}".strip()
    assert initialize(text, JAX_COORDINATOR_ADDRESS=coordinator) == expected


@pytest.mark.parametrize(
    ("in_config", "argument", "variable", "error"),
    [
        (None, None, None, ""),
        ("/own", None, "/cert", ""),  # each process may have its own
        (None, "/own", "/cert", ""),
        ("/own", None, None, "mtls_cert_file is '/own', but the coordination service of jax_ring.launch does not use"),
        (None, "/own", None, "mtls_cert_file is '/own', but the coordination service of jax_ring.launch does not use"),
        (None, None, "/cert", "mtls_cert_file is None, but the coordination service of jax_ring.launch uses"),
    ],
)
def test_mutual_tls_that_the_service_does_not_have(initialize, in_config, argument, variable, error):
    text = f"import jax.distributed\njax.distributed.initialize(mtls_cert_file={argument!r})"
    own = {"JAX_COORDINATOR_ADDRESS": "unix:/tmp/a", **({"JAX_MTLS_CERT_FILE": variable} if variable else {})}
    found = initialize(text, in_config, **own)
    assert (f"ValueError: jax.distributed.initialize: {error}" if error else "127.0.0.1") in found


@pytest.mark.full
def test_another_coordinator_as_without_the_launcher(script):
    with reserved_address() as address:
        path = script(
            "import os, jax\nprocess = int(os.environ['JAX_PROCESS_ID'])\n"
            f"jax.distributed.initialize({address!r}, 2, process, initialization_timeout=60)\n"
            "print('initialized', jax.process_count())"
        )
        status, out, err = run("-n", "2", path)
    assert status == 0, err
    assert out == ["[0] initialized 2", "[1] initialized 2"]


def test_a_process_that_exits_before_initialize_is_named(script):
    path = script(
        "import os, sys, time\n"
        "if os.environ['JAX_PROCESS_ID'] == '1': time.sleep(1); sys.exit(0)\n"
        "import jax\n"
        "jax.distributed.initialize(initialization_timeout=60)"
    )
    began = time.monotonic()
    status, _, err = run("-n", "2", path)
    assert status != 0
    assert "rank 1 (pid" in err.splitlines()[-1]
    assert "initialize" in err.splitlines()[-1]
    assert time.monotonic() - began < 30


def test_the_launcher_is_told_of_initialize(monkeypatch):
    """At once, also where it neither reads nor answers, and where there is none."""
    monkeypatch.delenv(protocol.CONTROL_VARIABLE, raising=False)
    protocol.tell_initialize()
    folder = SocketFolder()
    path = folder.socket("control")
    monkeypatch.setenv(protocol.CONTROL_VARIABLE, path)
    monkeypatch.setenv(protocol.PROCESS_VARIABLE, "7")
    protocol.tell_initialize()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        began = time.monotonic()
        protocol.tell_initialize()
        assert time.monotonic() - began < 0.2
        connection, _ = server.accept()
        with connection, connection.makefile() as lines:
            assert list(lines) == ['[7, "initialize", []]\n']
    folder.close()


NAMES = ["json", "socket", "logging", "threading", "asyncio", "types", "signal", "ctypes", "runpy", "re", "io", "queue"]
SAYS_WHAT_IT_GETS = """
import sys
import {name}
print(getattr({name}, "X", "of Python"))
print(sorted({{"json", "socket", "threading", "ctypes", "pkgutil", "runpy"}} & {{*sys.modules}}))
"""


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("program", ["program/s.py", "-m s", "program"])
def test_a_module_beside_it_as_under_python(script, tmp_path, monkeypatch, name, program):
    """Python itself has imported some of these, and with -m imports a few more."""
    (tmp_path / "program").mkdir()
    for file in ("s.py", "__main__.py"):
        script(SAYS_WHAT_IT_GETS.format(name=name), f"program/{file}")
    script("X = 'beside it'", f"program/{name}.py")
    *option, program = program.split()
    monkeypatch.chdir(tmp_path / "program" if option else tmp_path)
    expected = output_of(*option, program)[:2]
    kind = "module" if option else "script"
    assert output_of("-P", worker.__file__, "alone", kind, program)[:2] == expected
    assert output_of(*OF_LAUNCHER, kind, program)[:2] == expected


def test_the_launcher_is_told_of_an_exception_beside_such_modules(script):
    for name in ("json", "socket", "threading", "re", "select"):
        script("raise ImportError(__file__)", f"{name}.py")
    status, _, err = run("-n", "1", script("raise ValueError('bad batch')"))
    assert status == 1
    assert err.splitlines()[-1].endswith(" raised ValueError: bad batch")


# Prints the files that it has inherited beside the usual three.
LISTS = """
import os
found = []
for file in range(3, 1024):
    try: os.fstat(file)
    except OSError: continue
    found.append(os.readlink(f"/proc/self/fd/{file}"))
print(found)
"""
STARTS = {
    "system": "os.system(shlex.join(program))",
    "spawnv": "os.spawnv(os.P_WAIT, program[0], program)",
    "posix_spawn": "os.waitpid(os.posix_spawn(program[0], program, os.environ), 0)",
    "subprocess": "subprocess.run(program, close_fds=False)",
    "fork and execv": "os.fork() or os.execv(program[0], program); os.wait()",
    "execv": "os.execv(program[0], program)",
}


@pytest.mark.parametrize("start", STARTS)
def test_programs_of_the_script_inherit_no_files_of_the_launcher(script, start):
    """They may run as another user, who would read the key and write commits."""
    script(LISTS, "lists.py")
    text = f"""
import os, pathlib, shlex, subprocess, sys
program = [sys.executable, str(pathlib.Path(__file__).with_name("lists.py"))]
{STARTS[start]}
"""
    status, out, err = run("-n", "1", script(text))
    assert (status, out) == (0, ["[0] []"]), err


def test_forks_have_the_files_of_the_launcher(script):
    """They are a part of the script."""
    path = script(
        f"""
import multiprocessing, os, runpy
protocol = runpy.run_path({protocol.__file__!r})
_, *kept = map(int, os.environ[protocol["KEPT_VARIABLE"]].split(","))
def writes(number):
    assert len(protocol["own_key"]()) == 32
    protocol["write_mark"](kept[number], True, 0, number)
if os.fork() == 0:
    writes(0)
    os._exit(0)
assert os.wait()[1] == 0
child = multiprocessing.get_context("fork").Process(target=writes, args=(1,))
child.start()
child.join()
print([protocol["read_mark"](file) for file in kept])
"""
    )
    assert run("-n", "1", path) == (0, ["[0] [(0, 0), (0, 1)]"], "")


def test_a_number_that_names_another_file_is_no_key(monkeypatch, tmp_path):
    """In a program that a process starts the variable may have that of a file of its own."""
    monkeypatch.delenv(protocol.SECRET_VARIABLE, raising=False)
    (tmp_path / "other").write_bytes(b"x" * 64)
    with open(tmp_path / "other") as other:
        monkeypatch.setenv(protocol.KEY_VARIABLE, str(other.fileno()))
        assert protocol.own_key() == b""
