"""Finds out which custom calls XLA records in CUDA graphs, from the dump of a compiled program. Needs no GPU."""

import pathlib
from typing import NamedTuple

# Without the first flag XLA records only sequences of at least five commands, and without the second no loops.
FLAGS = "--xla_gpu_graph_min_graph_size=1 --xla_gpu_enable_command_buffer=+WHILE,+CONDITIONAL"


class Recorded(NamedTuple):
    """The custom calls of a program.

    Attributes:
      inside: the number that are in a command buffer, which XLA runs as a CUDA graph.
      outside: the number of the others.
      loops: the number of loops that are in a command buffer as a whole.
    """

    inside: int
    outside: int
    loops: int


def dump_flags(folder: pathlib.Path) -> str:
    """The flags with which XLA writes what `recorded` reads. XLA writes no list for a program that records nothing."""
    return f"--xla_dump_to={folder} --xla_dump_hlo_as_text"


def recorded(folder: pathlib.Path, module: str) -> Recorded:
    """What XLA records of the program of this name; Recorded(0, 0, 0) if it records nothing or has not compiled it."""
    found = [0, 0, 0]
    for file in folder.glob(f"*.{module}.thunk_sequence_after_thunk_passes.txt"):
        buffer = None  # the indentation of the current command buffer
        for line in file.read_text().splitlines():
            _, colon, command = line.partition(": ")
            if not colon:
                continue  # the head of a condition or body
            indent = len(line) - len(line.lstrip())
            if buffer is not None and indent <= buffer:
                buffer = None
            if command.startswith("kCommandBuffer"):
                buffer = indent
            elif command.startswith("kCustomCall "):
                found[0 if buffer is not None else 1] += 1
            elif command.startswith("kWhile") and buffer is not None:
                found[2] += 1
    return Recorded(*found)
