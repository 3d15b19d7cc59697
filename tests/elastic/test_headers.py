"""Headers of commits that are damaged, or written by somebody else: each is refused with what is wrong."""

import json

import numpy as np
import pytest

from jax_ring.elastic.snapshots import UNDIVIDED, Snapshot


def a_leaf(**changes):
    leaf = {"path": "['w']", "dtype": "float32", "shape": [4, 2], **changes}
    return {name: value for name, value in leaf.items() if value is not ...}


def a_header(*leaves, **changes):
    return {"processes": 2, "sections": [-1], "leaves": [*leaves], **changes}


def test_whole_ones_are_taken():
    boxes = [[[[0, 3], [0, 2]]], [[[3, 4], [0, 2]]]]
    header = a_header(a_leaf(), a_leaf(boxes=boxes), {"path": "['step']", "value": 3}, sections=[-1, 1])
    snapshot, sections = Snapshot.of_header(json.dumps(header).encode(), "here")
    assert sections == [UNDIVIDED, 1]
    assert [snapshot.num_bytes(section) for section in (UNDIVIDED, 0, 1)] == [32, 24, 8]


WHOLE = [[0, 4], [0, 2]]
HUGE = 1 << 62
NO_ARRAY = "is no array"
REFUSED = {
    "no JSON": (b"\x80\x04\x95", "decode"),
    "an unfinished one": (b'{"processes": 2', "delimiter"),
    "too deep": (b"[" * 100_000, ""),
    "a long number": (b'{"processes": ' + b"9" * 10_000, "digits"),
    "a list": ([], "it is no header"),
    "another field": (a_header(more=1), "it is no header"),
    "no processes": (a_header(processes=0), "it is of 0 processes"),
    "True processes": (a_header(processes=True), "it is of True processes"),
    "too many processes": (a_header(processes=1 << 40), r"it is of 10\d+ processes"),
    "leaves that are none": (a_header(leaves={"a": 1}), "'a' is no leaf"),
    "a leaf that is a number": (a_header(3), "3 is no leaf"),
    "a leaf without a path": (a_header(a_leaf(path=...)), "is no leaf"),
    "a path that is a number": (a_header(a_leaf(path=1)), "is no leaf"),
    "a value and a dtype": (a_header(a_leaf(value=1)), "is no value"),
    "a value that is a tree": (a_header({"path": "a", "value": {"b": 1}}), "is no value"),
    "a value that is nothing": (a_header({"path": "a", "value": None}), "is no value"),
    "an unknown field": (a_header(a_leaf(pickle="x")), NO_ARRAY),
    "no dtype": (a_header(a_leaf(dtype=...)), NO_ARRAY),
    "an unknown dtype": (a_header(a_leaf(dtype="object")), NO_ARRAY),
    "a dtype that is a list": (a_header(a_leaf(dtype=["float32"])), NO_ARRAY),
    "no shape": (a_header(a_leaf(shape=...)), NO_ARRAY),
    "a negative shape": (a_header(a_leaf(shape=[-1, -8])), NO_ARRAY),
    "a shape of floats": (a_header(a_leaf(shape=[4.0])), NO_ARRAY),
    "a shape of bools": (a_header(a_leaf(shape=[True])), NO_ARRAY),
    "too many dimensions": (a_header(a_leaf(shape=[1] * 100)), NO_ARRAY),
    "more than memory": (a_header(a_leaf(shape=[HUGE, HUGE])), r"\['w'\] is larger than this host's memory"),
    "nothing, but large": (a_header(a_leaf(shape=[HUGE, 0])), r"\['w'\] is larger than this host's memory"),
    "more than memory in all": (a_header(*[a_leaf(shape=[1 << 32])] * 10_000), "are more than this host's memory"),
    "keys of a number": (a_header(a_leaf(key=1)), NO_ARRAY),
    "keys of an unknown generator": (a_header(a_leaf(key="dice", dtype="uint32")), "dice"),
    "keys that a terminal obeys": (a_header(a_leaf(key="\x1b[2J", dtype="uint32")), r"'\\x1b\[2J' names no generator"),
    "keys of another shape": (a_header(a_leaf(key="threefry2x32", dtype="uint32", shape=[3])), "threefry"),
    "keys of floats": (a_header(a_leaf(key="threefry2x32")), "float32"),
    "a weak type that is none": (a_header(a_leaf(weak="yes")), NO_ARRAY),
    "boxes of another number": (a_header(a_leaf(boxes=[[WHOLE]])), "is not of 2 processes"),
    "boxes that are no list": (a_header(a_leaf(boxes=[[WHOLE], 1])), "'int' object is not iterable"),
    "a box outside": (a_header(a_leaf(boxes=[[[[0, 5], [0, 2]]], []])), r"is at \[\[0, 5\], \[0, 2\]\]"),
    "a negative box": (a_header(a_leaf(boxes=[[[[-1, 4], [0, 2]]], []])), "is at"),
    "a box that ends before": (a_header(a_leaf(boxes=[[[[4, 0], [0, 2]]], []])), "is at"),
    "a box of another shape": (a_header(a_leaf(boxes=[[[[0, 4]]], []])), "is at"),
    "a box of numbers": (a_header(a_leaf(boxes=[[[0, 4]], []])), "is at"),
    "boxes that leave some out": (a_header(a_leaf(boxes=[[[[0, 3], [0, 2]]], []])), "have 6 of 8 elements"),
    "boxes that are there twice": (a_header(a_leaf(boxes=[[WHOLE], [WHOLE]])), "have 16 of 8 elements"),
    "boxes that overlap": (
        a_header(a_leaf(boxes=[[[[0, 2], [0, 2]]], [[[1, 3], [0, 2]]]])),
        r"the parts of \['w'\] overlap",
    ),
    "a box twice": (
        a_header(a_leaf(boxes=[[[[0, 2], [0, 2]]], [[[0, 2], [0, 2]]]])),
        r"the parts of \['w'\] overlap",
    ),
    "boxes that leave a hole": (
        a_header(a_leaf(boxes=[[[[0, 2], [0, 2]], [[3, 4], [0, 2]]], [[[3, 4], [0, 2]]]])),
        r"the parts of \['w'\] overlap",
    ),
    "a path that a terminal obeys": (a_header(a_leaf(boxes=[[WHOLE]], path="\x1b[2J")), r"\\x1b\[2J is not of 2 proc"),
    "sections that are none": (a_header(sections=[0]), r"its sections are \[0\]"),
    "a section twice": (a_header(sections=[-1, -1]), "its sections are"),
    "a section that is a text": (a_header(sections=["-1"]), "its sections are"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused(name):
    header, what = REFUSED[name]
    data = header if isinstance(header, bytes) else json.dumps(header).encode()
    with pytest.raises(RuntimeError, match=f"^jax_ring.elastic: what process 1 has sent is damaged, or of .*{what}"):
        Snapshot.of_header(data, "what process 1 has sent")


def test_paths_of_others_are_escaped():
    """In the error of a state that has other leaves."""
    header = a_header(a_leaf(), {"path": "\x1b[2J\nmine", "value": 1})
    snapshot, _ = Snapshot.of_header(json.dumps(header).encode(), "here")
    assert snapshot.paths_not_in_both({"w": np.zeros((4, 2))}) == r"\x1b[2J\nmine"


def test_any_damage_is_refused_or_harmless():
    """One byte of a header in any place: it is refused, or it is one whose sizes are known."""
    header = json.dumps(a_header(a_leaf(boxes=[[WHOLE], []]), a_leaf())).encode()
    rng = np.random.default_rng(0)
    refused = 0
    for place in range(len(header)):
        damaged = bytearray(header)
        damaged[place] = rng.integers(256)
        try:
            snapshot, sections = Snapshot.of_header(bytes(damaged), "here")
        except RuntimeError:
            refused += 1
        else:
            assert sum(map(snapshot.num_bytes, sections)) < 1000
    assert refused > len(header) / 2
