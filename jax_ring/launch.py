"""`python -m jax_ring.launch`: the command of jax_ring/launcher/cli.py."""

import sys

from jax_ring.launcher.cli import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
