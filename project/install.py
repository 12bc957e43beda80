"""Make the virtual environment of `make run`, `make test` and `make proofs`; announce large downloads.

PyTorch comes from its own index of CPU builds where the machine has no GPU: the default build for Linux brings CUDA and
is ten times as large. A PyTorch that is installed stays, and where pip is configured with an index, that index is used.

Runs on a bare Python: standard library only, no import from this project. A stamp in the venv holds the hash of each
requirement file, so that nothing is done when nothing has changed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import re
import shutil
import subprocess
import sys
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PIP = "pip==26.3"  # older versions download whole wheels for their metadata
CPU_INDEX = "https://download.pytorch.org/whl/cpu"  # "Start Locally" on pytorch.org
# What pip asks instead of PyPI, or beside it: its configuration decides then where PyTorch comes from.
_OWN_INDEX = re.compile(r"^[^=]*\.((?:extra-)?index-url|find-links|no-index)=", re.MULTILINE)
_GPU_FILES = ("dev/nvidiactl", "dev/kfd", "proc/driver/nvidia/version")  # NVIDIA's driver, AMD's
APT_LINE = "sudo apt-get install -y python3-venv"


def main() -> int:
    """Create or update the venv; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, default=Path(".venv"))
    parser.add_argument("-r", "--requirement", type=Path, action="append", required=True, help="may be repeated")
    parser.add_argument(
        "--alone", type=Path, action="append", default=[], help="a file whose packages come without what they ask for"
    )
    options = parser.parse_args()
    try:
        install(options.venv, options.requirement, options.alone)
    except Failed as failure:
        print(f"\n{failure}", file=sys.stderr)
        return 1
    return 0


class Failed(Exception):
    """A failure, as a sentence with its remedy."""


def install(venv: Path, requirements: list[Path], alone: list[Path]) -> None:
    """Install what `requirements` pin into `venv`, unless the stamp shows that it is there; then what `alone` pins."""
    if sys.version_info < (3, 11):  # noqa: UP036 - the one file that an older Python may try to run
        raise Failed(
            f"Python 3.11 or newer is needed; this is {sys.version.split()[0]}. Try: make run PYTHON=python3.11"
        )
    stamp = venv / "streamserve-requirements.json"
    installed = json.loads(stamp.read_text()) if stamp.exists() else {}
    wanted = {str(path): _fingerprint(path) for path in (*requirements, *alone)}
    if wanted.items() <= installed.items():
        return
    python = venv / "bin" / "python"
    if not python.exists():
        _create(venv)
    _pip(python, ["install", "--quiet", PIP], "upgrading pip")
    _install_torch(python, requirements)
    _pip(python, ["install", *_files(requirements)], "installing")
    if alone:
        _pip(python, ["install", "--no-deps", *_files(alone)], "installing")
    stamp.write_text(json.dumps(installed | wanted))


def _create(venv: Path) -> None:
    print(f"Creating {venv}")
    try:
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    except subprocess.CalledProcessError:
        raise Failed(f"Python could not make a virtual environment. On Debian: {APT_LINE}") from None


def _fingerprint(path: Path) -> str:
    return hashlib.sha256((sys.version + path.read_text()).encode()).hexdigest()


def _files(requirements: list[Path]) -> list[str]:
    return [part for path in requirements for part in ("-r", str(path))]


def _pip(python: Path, arguments: list[str], what: str) -> None:
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *arguments]
    if subprocess.run(command, check=False).returncode != 0:
        raise Failed(
            f"pip failed while {what} (its own message is above). Is there a network, or a proxy in PIP_PROXY? "
            "Running the same make command again continues where it stopped."
        )


def _install_torch(python: Path, requirements: list[Path]) -> None:
    """Install PyTorch's CPU build where it is wanted; print which build comes, and its size, unless torch is there."""
    pinned = re.search(r"^torch==\S+", "\n".join(path.read_text() for path in requirements), re.MULTILINE)
    if pinned is None or _has_torch(python, pinned.group()):
        return
    index = torch_index(_pip_config(python), has_gpu())
    if index and _announce(_resolve(python, pinned.group(), *index)):
        # Without what it asks for: the requirement files pin that, and it comes from the usual index.
        _pip(python, ["install", "--no-deps", *index, pinned.group()], "installing PyTorch")
        return
    if index:
        print(f"{CPU_INDEX} does not have it, or cannot be reached: the default build comes.")
    _announce(_resolve(python, pinned.group()))


def torch_index(pip_config: str, gpu: bool) -> list[str]:
    """Return pip's options for PyTorch's index of CPU builds; [] where the default build, or pip's own index, is right.

    `pip_config` is what `pip config list` prints. Only for Linux the default build is that of CUDA.
    """
    if gpu or platform.system() != "Linux" or _OWN_INDEX.search(pip_config):
        return []
    return ["--index-url", CPU_INDEX]


def has_gpu(root: Path = Path("/")) -> bool:
    """Whether a driver of a GPU is loaded, or its tool is there."""
    return shutil.which("nvidia-smi") is not None or any((root / name).exists() for name in _GPU_FILES)


def _pip_config(python: Path) -> str:
    command = [str(python), "-m", "pip", "config", "list"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def _announce(wheels: list[dict]) -> bool:
    """Print the build of torch among `wheels` and the size of all; return whether it is among them."""
    torch = next((wheel for wheel in wheels if wheel["metadata"]["name"].lower() == "torch"), None)
    if torch is None:
        return False
    total = sum(_sizes([wheel["download_info"]["url"] for wheel in wheels]))
    print(f"PyTorch {torch['metadata']['version']} ({_build(torch, wheels)}): {total / 1e6:,.0f} MB to download.")
    return True


def _build(torch: dict, wheels: list[dict]) -> str:
    if "+cpu" in torch["metadata"]["version"]:
        return "CPU build"
    if any(wheel["metadata"]["name"].lower().startswith("nvidia") for wheel in wheels):
        return "CUDA build"
    return "the default build of your package index"


def _has_torch(python: Path, pinned: str) -> bool:
    code = "import importlib.metadata as m; print(m.version('torch').split('+')[0])"
    found = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False)
    return found.stdout.strip() == pinned.partition("==")[2]


def _resolve(python: Path, requirement: str, *options: str) -> list[dict]:
    """Return what pip would install for `requirement`, without downloading it; [] if pip fails."""
    command = [str(python), "-m", "pip", "install", "--dry-run", "--quiet", "--report", "-", *options, requirement]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return json.loads(found.stdout)["install"] if found.returncode == 0 else []


def _sizes(urls: list[str]) -> list[int]:
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(_size, urls))


def _size(url: str) -> int:
    """Return the size of `url` in bytes; 0 if the server does not send it."""
    try:
        if url.startswith("file:"):
            return Path(urllib.parse.unquote(urllib.parse.urlsplit(url).path)).stat().st_size
        request = urllib.request.Request(url, method="HEAD")
        with urllib.request.urlopen(request, timeout=20) as answer:
            return int(answer.headers.get("Content-Length", 0))
    except OSError:
        return 0


if __name__ == "__main__":
    sys.exit(main())
