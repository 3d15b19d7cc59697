"""Finds a small program that shows the same fault."""

import runner
from program import Program


def shrink(program: Program, fault: runner.Fault, trials: int) -> tuple[Program, runner.Fault]:
    """The smallest program found in this many trials, and its fault."""
    tried: set[str] = set()
    while True:
        for smaller in program.smaller():
            source = smaller.source()
            if source in tried:
                continue
            if len(tried) == trials:
                return program, fault
            tried.add(source)
            try:
                runner.check(source)
            except runner.Fault as found:
                program, fault = smaller, found
                break
        else:
            return program, fault
