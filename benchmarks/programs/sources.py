"""Fetches the programs of others: distributions by name, version and hash, into a folder outside of the source tree."""

import importlib.metadata
import re
import subprocess
import sys
import tarfile
from pathlib import Path

REQUIREMENTS = Path(__file__).parent / "requirements.txt"
# Distributions used only for their examples, which wheels lack. The package itself comes from the environment.
EXAMPLES = ("flax",)
# Distributions in the version of the environment, from the extra `test`.
OF_ENVIRONMENT = ("equinox", "flax", "optax")


def full_name(source: str) -> str:
    """The name of a program's source with its version."""
    if source in OF_ENVIRONMENT:
        return f"{source}-{importlib.metadata.version(source)}"
    version = versions().get(source)
    return f"{source}-{version}" if version else source


def versions() -> dict[str, str]:
    """The versions of all distributions, by name."""
    return dict(re.findall(r"^([\w.-]+)==(\S+)", REQUIREMENTS.read_text(), re.MULTILINE))


def _pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *arguments, "--quiet", "--no-deps"], check=True)


def _requirements(folder: Path, of_examples: bool) -> str:
    """A file with the lines of one kind, each with the hashes below it."""
    entries = re.findall(r"^[\w.-]+==\S+(?: \\\n\s+--hash=\S+)+", REQUIREMENTS.read_text(), re.MULTILINE)
    file = folder / ("examples.txt" if of_examples else "packages.txt")
    file.write_text("\n".join(each for each in entries if (each.partition("==")[0] in EXAMPLES) is of_examples) + "\n")
    return str(file)


def fetch(folder: Path) -> list[Path]:
    """Fetches what is not there yet, and returns the folders for Python's path.

    Packages are installed into the folder without what they depend on, so that JAX and flax stay the environment's.
    """
    folder = folder / f"{sys.implementation.cache_tag}"
    packages, sources = folder / "packages", folder / "sources"
    if not packages.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        _pip("install", "--require-hashes", "--target", str(packages), "-r", _requirements(folder, False))
    if not sources.is_dir():
        archives = folder / "archives"
        _pip(
            *("download", "--require-hashes", "--no-binary", ",".join(EXAMPLES), "--dest", str(archives)),
            *("-r", _requirements(folder, True)),
        )
        for archive in archives.glob("*.tar.gz"):
            with tarfile.open(archive) as file:
                file.extractall(sources, filter="data")
    return [packages, sources]
