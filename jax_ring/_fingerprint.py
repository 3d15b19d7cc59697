"""A fingerprint of the native sources. The build compiles it in, and an import from the source tree compares it."""

import hashlib
import pathlib
import sys

_SUFFIXES = (".h", ".cc", ".cu", ".txt", ".cmake")


def fingerprint(ffi: pathlib.Path) -> str:
    """Hashes names and contents of the sources in the folder `ffi`, except its tests."""
    digest = hashlib.sha256()
    for path in sorted(path for path in ffi.rglob("*") if path.suffix in _SUFFIXES):
        name, content = path.relative_to(ffi).as_posix(), path.read_bytes()
        if not name.startswith("tests/"):
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:16]


if __name__ == "__main__":  # CMake runs it with the Python that the build is for
    print(fingerprint(pathlib.Path(sys.argv[1])))
