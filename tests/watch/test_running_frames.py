"""Looking at the frames of other threads: each is one, whatever these threads do meanwhile."""

from helpers import run_python

# Garbage is collected, and others run, each time that a few frames have got an object.
LOOKS = """
import gc, threading, time, types
from jax_ring.progress import watch

def calls(n):
    kept = [n]
    return n and (calls(n - 1) if n % 3 else more(n - 1, *range(n % 7)))

def more(n, *values):
    a = b = c = d = e = f = g = h = object()
    return n and calls(n - 1)

def run():
    while True:
        for n in range(30):
            calls(n)

def look(frame, code, instruction):
    assert type(frame) is type(instruction) is int and type(code) is types.CodeType
    assert -1 <= instruction < len(code.co_code), (code, instruction)
    codes.add(code)

reader = threading.get_ident()
gc.callbacks.append(lambda *_: threading.get_ident() == reader and time.sleep(1e-4))
for _ in range(2):
    threading.Thread(target=run, daemon=True).start()
codes = set()
gc.set_threshold(10, 5, 5)
for _ in range(400):
    assert not watch._runs(look) and gc.isenabled()
gc.disable()
assert not watch._runs(look) and not gc.isenabled()
assert {each.__code__ for each in (run, calls, more)} < codes
print("looked", flush=True)
"""


def test_frames_of_other_threads_are_read_at_one_moment():
    result = run_python(LOOKS)
    assert (result.returncode, result.stdout) == (0, "looked\n"), result.stderr
