"""A Dockerfile as a script: its instructions, and the commands of it that need no root, run in a folder.

What stands in for the image: `/srv` of the container is a folder, `python` is this Python's own, COPY takes what git
would commit and .dockerignore leaves. The virtual environment that the Dockerfile makes finds this one's packages, so
pip compares every pin and downloads nothing.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.servers.web_servers import ROOT

# They change the image's system, as root: the test names them and does not run them.
SYSTEM = ("apt-get ", "useradd ", "mkdir -m 700 /srv/state && chown ")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction: its word in upper case, and the rest of its line."""

    word: str
    rest: str


def instructions(path: Path) -> list[Instruction]:
    """Return the instructions of a Dockerfile."""
    return parsed(path.read_text())


def parsed(text: str) -> list[Instruction]:
    r"""Return the instructions, without comments; a line that ends with `\` continues in the next."""
    lines = text.replace("\\\n", " ").splitlines()
    found = [line.split(maxsplit=1) for line in lines if line.strip() and not line.startswith("#")]
    return [Instruction(word.upper(), rest.strip()) for word, rest in found]


def ignored(pattern_file: Path) -> list[str]:
    """Return the patterns of a .dockerignore."""
    lines = pattern_file.read_text().splitlines()
    return [line.strip().strip("/") for line in lines if line.strip() and not line.startswith("#")]


def is_ignored(name: str, patterns: list[str]) -> bool:
    """Return whether a path, or a folder that it is in, matches a pattern."""
    parts = name.split("/")
    heads = ["/".join(parts[: end + 1]) for end in range(len(parts))]
    return any(
        fnmatch.fnmatch(part if pattern.startswith("**/") else head, pattern.removeprefix("**/"))
        for head, part in zip(heads, parts, strict=True)
        for pattern in patterns
    )


@dataclass
class Image:
    """What a Dockerfile makes, in `root`; `skipped` are the commands that were not run."""

    root: Path
    context: Path = ROOT
    folder: Path = Path("/")
    environ: dict[str, str] = field(default_factory=dict)
    command: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    output: dict[str, str] = field(default_factory=dict)

    def build(self, path: Path) -> Image:
        """Follow the instructions."""
        for one in instructions(path):
            getattr(self, f"_{one.word.lower()}")(one.rest)
        return self

    def here(self, text: str) -> str:
        """Return `text` with the container's paths as paths of this machine."""
        return re.sub(r"(?<![\w.])/srv\b", str(self.root / "srv"), text)

    def run_environ(self) -> dict[str, str]:
        """Return the environment of a command: this one's without its settings, then the image's."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("DJANGO", "STREAMSERVE_"))}
        programs = self.root / "bin"
        if not programs.exists():
            programs.mkdir(parents=True)
            (programs / "python").symlink_to(Path(sys.base_prefix) / "bin" / "python3")
        own = {name: self.here(value) for name, value in self.environ.items()}
        return {**kept, "PATH": f"{programs}:{os.environ['PATH']}", "PIP_NO_INDEX": "1", **own}

    def _from(self, rest: str) -> None:
        assert re.fullmatch(r"python:3\.\d+-slim", rest), rest

    def _workdir(self, rest: str) -> None:
        self.folder = Path(self.here(rest))
        self.folder.mkdir(parents=True, exist_ok=True)

    def _copy(self, rest: str) -> None:
        *sources, target = rest.split()
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard", *sources],
            cwd=self.context,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        patterns = ignored(self.context / ".dockerignore")
        names = [name for name in listed if not is_ignored(name, patterns) and (self.context / name).exists()]
        assert names, rest
        for name in names:
            where = self.folder / target / (name if sources == ["."] else Path(name).name)
            where.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(self.context / name, where)

    def _run(self, rest: str) -> None:
        if rest.startswith(SYSTEM):
            self.skipped.append(rest)
            return
        made = re.search(r"--venv (\S+)", rest)
        if made is not None:
            self._prepare_venv(Path(self.here(made[1])))
        done = subprocess.run(
            self.here(rest),
            shell=True,
            cwd=self.folder,
            env=self.run_environ(),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=600,
        )
        assert done.returncode == 0, f"{rest}\n{done.stdout}"
        self.output[rest] = done.stdout

    def _prepare_venv(self, folder: Path) -> None:
        """Make the environment that a command would make, with the packages of this one in it."""
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        packages = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
        (Path(packages) / "what_it_needs.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def _env(self, rest: str) -> None:
        self.environ |= dict(pair.split("=", 1) for pair in rest.split())

    def _cmd(self, rest: str) -> None:
        self.command = [self.here(part) for part in json.loads(rest)]

    def _user(self, rest: str) -> None:
        assert any(f"useradd --create-home {rest}" in command for command in self.skipped)

    def _expose(self, rest: str) -> None:
        assert rest == self.environ["PORT"]

    def _volume(self, rest: str) -> None:
        assert rest == self.environ["STREAMSERVE_STATE_DIR"]
