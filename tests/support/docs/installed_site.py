"""The demo site of a checkout, with the library as a wheel in a venv of its own: what an upgrade replaces."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

# The site without the library. The tests hold the settings, in the first of these folders that has them.
_PARTS = ("manage.py", "project", "templates", "tests")
_SETTINGS = ("tests.support.sites.workers", "tests.support.sites", "tests.proofs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where a version of the demo site runs: the folder, and the Python that finds the library and what it needs."""

    folder: Path
    python: str = sys.executable

    def settings(self, name: str) -> str:
        """Return the module of the settings `name`, by its place in that version."""
        modules = [f"{package}.{name}" for package in _SETTINGS]
        return next(one for one in modules if (self.folder / f"{one.replace('.', '/')}.py").exists())


def install(tree: Path, folder: Path) -> Site:
    """Build the wheel of a checkout, install it in a new venv, and put the demo site beside it.

    What the library needs comes from the venv that runs the tests, so both versions have the same.
    """
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    subprocess.run(build, cwd=tree, check=True, capture_output=True)
    (wheel,) = folder.glob("streamserve-*.whl")
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    python = venv / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)], check=True)
    packages = sysconfig.get_path("purelib", vars={"base": str(venv), "platbase": str(venv)})
    (Path(packages) / "what_it_needs.pth").write_text(sysconfig.get_path("purelib") + "\n")
    site = folder / "site"
    site.mkdir()
    for part in _PARTS:
        source = tree / part
        if source.is_dir():
            shutil.copytree(source, site / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, site / part)
    return Site(folder=site, python=str(python))
