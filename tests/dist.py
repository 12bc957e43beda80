"""`python -m tests.dist FOLDER`: build the release's sdist and, from it, its wheel; fail if they are not whole.

Whole means: the version of the package; each file of streamserve/ that git tracks, and no other; in the sdist also what
its readers need. Standard library and `build`. tests/e2e/test_wheel.py installs both and runs the README's lines.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email import message_from_bytes
from pathlib import Path

from streamserve import __version__

ROOT = Path(__file__).parents[1]
# What an sdist has beside the package.
_BESIDE = ("README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml", "hatch_build.py", "docs/README.md")
# What hatchling adds to it.
_ADDED = {"PKG-INFO", ".gitignore"}


def main() -> int:
    """Build, check, print what was made; return the exit status."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "dist")
    for archive in folder.glob("streamserve-*"):
        archive.unlink()
    sdist, wheel = build(folder)
    faults = [*faults_of(sdist, names_of_sdist(sdist)), *faults_of(wheel, names_of_wheel(wheel))]
    for fault in faults:
        print(fault, file=sys.stderr)
    if f"\n## {__version__}" not in (ROOT / "CHANGELOG.md").read_text():
        print(f"note: CHANGELOG.md has no section {__version__} yet; a release needs it (docs/versioning.md)")
    if not faults:
        print(f"{sdist}\n{wheel}")
    return 1 if faults else 0


def build(folder: Path) -> tuple[Path, Path]:
    """Build both archives into `folder`: the wheel is made from the sdist. Raises CalledProcessError."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    (sdist,), (wheel,) = folder.glob("streamserve-*.tar.gz"), folder.glob("streamserve-*.whl")
    return sdist, wheel


def names_of_sdist(path: Path) -> set[str]:
    """Return the paths of its files, below its folder."""
    with tarfile.open(path) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


def names_of_wheel(path: Path) -> set[str]:
    """Return the paths of its files."""
    with zipfile.ZipFile(path) as archive:
        return set(archive.namelist())


def faults_of(path: Path, names: set[str]) -> Iterator[str]:
    """Yield what is wrong with an archive that has the files `names`."""
    if f"streamserve-{__version__}" not in path.name:
        yield f"{path.name} is not of version {__version__}"
    package = {name for name in names if name.startswith("streamserve/")}
    for name in sorted(tracked() - package):
        yield f"{path.name} lacks {name}"
    for name in sorted(package - tracked()):
        yield f"{path.name} has {name}, which git does not track"
    if path.suffix == ".whl":
        yield from _faults_of_metadata(path)
    else:
        yield from (f"{path.name} lacks {name}" for name in _BESIDE if name not in names)
        tops = {name.partition("/")[0] for name in names} - {"streamserve", "docs", *_BESIDE, *_ADDED, ""}
        yield from (f"{path.name} has {name}, which no reader needs" for name in sorted(tops))


def tracked() -> set[str]:
    """Return the files of the package that git tracks."""
    done = subprocess.run(["git", "ls-files", "streamserve"], cwd=ROOT, check=True, capture_output=True, text=True)
    return set(done.stdout.splitlines())


def _faults_of_metadata(path: Path) -> Iterator[str]:
    with zipfile.ZipFile(path) as archive:
        metadata = message_from_bytes(archive.read(f"streamserve-{__version__}.dist-info/METADATA"))
    if metadata["Version"] != __version__:
        yield f"{path.name} states version {metadata['Version']}"
    if "streamserve" not in str(metadata.get_payload())[:200]:
        yield f"{path.name} has no README as its description"
    if metadata["License-Expression"] != "BSD-3-Clause AND MIT":
        yield f"{path.name} states the licence {metadata['License-Expression']}"


if __name__ == "__main__":
    sys.exit(main())
