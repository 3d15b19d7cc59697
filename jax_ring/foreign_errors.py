"""Texts of errors of JAX, XLA, Gloo and Python, which tell them apart.

`launcher/worker.py` loads this file by path, without the package.
"""

import re

# One of these by which another process is to blame.
OF_ANOTHER = re.compile(
    r"Gloo|Connection closed by peer|distributed service detected fatal errors|GetKeyValue\(\) timed out"
)
# One of XLA's collectives between CPU processes has failed.
OF_COLLECTIVE = re.compile(r"Gloo |collective operation timed out")
# A key of JAX's key-value store has a value already.
KEY_EXISTS = re.compile("ALREADY_EXISTS")
# A function used a mesh axis outside of its shard_map.
UNBOUND_AXIS = re.compile(r"unbound axis")
# A call lacks an argument that has no default.
MISSING_KEYWORD = re.compile(r"keyword-only\sargument|obj_fn\smust")
# Two trees differ in structure.
OTHER_TREE = re.compile("pytree structure error")
