"""`python -m jax_ring.launch -n 4 script.py`: Runs a script as several processes of `jax.distributed`.

In the script, `jax.distributed.initialize()` needs no arguments. Each line of output is prefixed with the rank of its
process. When a process fails, the launcher terminates the others, starts all of them again if it has restarts left
(--max-restarts), and otherwise exits with the status of the failed one. It forwards SIGINT, SIGTERM and SIGHUP, and
kills processes that are still running after the grace period. The standard input of the processes is empty.
"""

import asyncio
from collections.abc import Sequence

from jax_ring.launcher import arguments as command_line
from jax_ring.launcher.multi_host.hosts import job


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status."""
    options = command_line.parse(arguments, (__doc__ or "").partition(": ")[2])
    return asyncio.run(job(options).run())
