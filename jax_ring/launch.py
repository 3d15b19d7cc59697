"""`python -m jax_ring.launch -n 4 script.py`: Runs a script as several processes of `jax.distributed`.

In the script, `jax.distributed.initialize()` needs no arguments. Output lines are prefixed with the process's rank.
When a process fails, the launcher ends the others, starts all again if restarts are left (--max-restarts), or exits
with the failed one's status. It forwards SIGINT, SIGTERM, SIGHUP and SIGQUIT, and kills what still runs after the grace
period. SIGUSR1 and SIGUSR2 are passed on, and end nothing. Standard input is empty.
"""

import asyncio
import sys
from collections.abc import Sequence

from jax_ring.launcher import arguments as command_line
from jax_ring.launcher.coordinator.folder import NoPlaceError
from jax_ring.launcher.job import Job
from jax_ring.launcher.processes import explained, is_lack


def main(arguments: Sequence[str] | None = None) -> int:
    options = command_line.parse(arguments, (__doc__ or "").partition(": ")[2])
    try:
        return asyncio.run(Job(options).run())
    except NoPlaceError as error:
        sys.exit(f"jax_ring.launch: failed: {error}")
    except OSError as error:
        if not is_lack(error):
            raise
        sys.exit(f"jax_ring.launch: failed: {options.processes} processes cannot be started: {explained(error)}")


if __name__ == "__main__":
    sys.exit(main())
