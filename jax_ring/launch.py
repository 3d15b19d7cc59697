"""`python -m jax_ring.launch`: the command of jax_ring/distributed/launcher.py."""

import sys

from jax_ring.distributed.launcher import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
