"""What a load starts from: a model's files (a folder, or a hub id downloaded to one), and the memory of the machine.

Reads only safetensors, JSON and text: no remote code, no pickles. No torch: the capacity command uses this too. Why a
model cannot be loaded; each message names the problem and the way out, for the operator:

ModelLoadError
├── ModelNotFound      no folder there, or no such repository on the hub
├── HubUnreachable     the hub is offline or was switched off
├── NoSafetensors      the folder has no weights we read
└── UnsupportedModel   our attention would not compute what the model means
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from streamserve.engine.plan import Progress, no_progress
from streamserve.protocol.requests import MODEL_DEFAULTS, RANGES

SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "tokenizer*")
OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".msgpack", ".h5", ".onnx")


class ModelLoadError(Exception):
    """The model cannot be loaded as configured."""


class ModelNotFound(ModelLoadError):
    """Nothing is at that path or under that name."""


class HubUnreachable(ModelLoadError):
    """The name is a hub id, and the hub does not answer."""


class NoSafetensors(ModelLoadError):
    """There are weights, but only in formats that can run code or that we do not read."""


class UnsupportedModel(ModelLoadError):
    """The architecture would give wrong answers in this engine."""


def resolve(
    path: str, patterns: Sequence[str] = (*SMALL_FILES, "*.safetensors"), progress: Progress = no_progress
) -> Path:
    """Return the local folder of the model named `path`; downloads a hub id's files when the hub allows.

    `progress` gets the bytes downloaded, on threads of the hub library; an exception of it ends the download.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ModelNotFound(f"{path} is a file. Name the folder that holds config.json and the .safetensors files.")
    if _looks_like_path(path):
        raise ModelNotFound(f"There is no folder at {path}. Check the path, or name a hub id such as org/model.")
    return _download(path, patterns, progress)


def find(path: str) -> Path | None:
    """Return the folder of the model named `path` if it is on this machine, or was downloaded; downloads nothing."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists() or _looks_like_path(path):
        return None
    from huggingface_hub import try_to_load_from_cache

    try:
        file = try_to_load_from_cache(path, "config.json")
    except ValueError:  # no hub id either
        return None
    return Path(file).parent if isinstance(file, str) else None


def _looks_like_path(path: str) -> bool:
    return path.startswith(("/", ".", "~")) or path.count("/") > 1 or path.endswith("/")


def _download(hub_id: str, patterns: Sequence[str], progress: Progress) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ModelNotFound(
            f"There is no folder {hub_id}, and to read it as a hub id needs a package: pip install huggingface_hub"
        ) from None

    raised: list[Exception] = []

    def on_bytes(loaded: int, total: int) -> None:
        try:
            progress("download", loaded / total if total else 0.0, loaded, total)
        except Exception as error:  # carried past the hub library, which would replace it by its own error
            raised.append(error)
            raise

    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(patterns), tqdm_class=_bar(on_bytes)))
    except Exception as error:  # the hub library raises a wide and changing family
        if raised:
            raise raised[0] from None
        raise _hub_error(hub_id, error) from error


def _bar(on_bytes: Callable[[int, int], None]) -> type[Any]:
    """Return a progress bar for the hub library that shows nothing and reports the bytes written to disk."""
    from tqdm import tqdm  # type: ignore[import-untyped]  # comes with the hub library, without types

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **fields: Any) -> None:
            # Of its bars for bytes one counts what came over the network: less, where the hub knows parts already.
            self.is_counted = fields.get("unit") == "B" and not str(fields.get("desc", "")).startswith("Downloading")
            super().__init__(*args, **{**fields, "disable": True})

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if self.is_counted:
                on_bytes(int(self.n), int(self.total or 0))

    return Bar


def _hub_error(hub_id: str, error: Exception) -> ModelLoadError:
    kind = type(error).__name__
    if kind in ("RepositoryNotFoundError", "HFValidationError", "RevisionNotFoundError"):
        return ModelNotFound(
            f"No folder {hub_id} here, and the hub knows no such model (or it is private: set HF_TOKEN)."
        )
    if kind == "GatedRepoError":
        return ModelNotFound(f"{hub_id} is gated: accept its terms on the hub and set HF_TOKEN.")
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return HubUnreachable(
            f"{hub_id} is neither a folder here nor in the local cache, and HF_HUB_OFFLINE is set. "
            "Unset it, or name a folder."
        )
    return HubUnreachable(
        f"{hub_id} is neither a folder here nor in the local cache, and the hub cannot be reached ({kind}). "
        "Check the network, or name a folder."
    )


def require_safetensors(folder: Path) -> list[Path]:
    """Return the folder's weight files; refuse folders without any."""
    found = sorted(folder.glob("*.safetensors"))
    if found:
        return found
    others = sorted(file.name for file in folder.iterdir() if file.suffix in OTHER_WEIGHTS)
    if others:
        raise NoSafetensors(
            f"{folder} has only {others[0]}; streamserve reads safetensors only. Convert it: load it with "
            "transformers where you trust the file and call save_pretrained()."
        )
    raise NoSafetensors(f"{folder} has no .safetensors file. Finish the download, or name another folder.")


def sampling_defaults(folder: Path) -> dict[str, float]:
    """Return the sampling defaults of the model's generation_config.json that the engine can compute with."""
    file = folder / "generation_config.json"
    given = json.loads(file.read_text()) if file.exists() else {}
    return {
        name: int(given[name]) if name == "top_k" else given[name]
        for name in MODEL_DEFAULTS
        if type(given.get(name)) in (int, float) and RANGES[name].low <= given[name] <= RANGES[name].high
    }


def read_config(folder: Path) -> dict[str, Any]:
    """Return the folder's config.json, unchanged."""
    file = folder / "config.json"
    if not file.exists():
        raise ModelLoadError(f"{folder} has no config.json; it is not a model folder. Name the folder that has one.")
    return _parse(file, file.read_bytes())


def read_headers(folder: Path) -> list[dict[str, Any]]:
    """Return the headers of the folder's .safetensors files: tensor name -> dtype, shape, place. [] if none."""
    return [_parse(file, _header(file)) for file in sorted(folder.glob("*.safetensors"))]


def _parse(file: Path, text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ModelLoadError(f"{file} cannot be read ({error}). Copy or download it again.") from error
    if not isinstance(found, dict):
        raise ModelLoadError(f"{file} holds no JSON object. Copy or download it again.")
    return found


def revision(folder: Path) -> str:
    """Return a hash that changes when config or weights change: salt of the prefix cache."""
    digest = hashlib.sha256()
    for name in ("config.json", "generation_config.json"):
        file = folder / name
        digest.update(file.read_bytes() if file.exists() else b"")
    for file in sorted(folder.glob("*.safetensors")):
        status = file.stat()
        digest.update(json.dumps([file.name, status.st_size, status.st_mtime_ns]).encode())
        digest.update(_header(file))
    return digest.hexdigest()


def _header(file: Path) -> bytes:
    """Return the JSON header of a safetensors file: 8 bytes of length, then names, dtypes, shapes, offsets."""
    with file.open("rb") as stream:
        length = stream.read(8)
        if len(length) < 8:
            raise ModelLoadError(f"{file} is cut short. Copy or download it again.")
        return stream.read(min(struct.unpack("<Q", length)[0], 100_000_000))


def cache_folder() -> Path:
    """Return the folder for what is computed once for a user of this machine."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "streamserve"


def total_memory(cgroup_limit: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """Return the RAM this process may use: the machine's, or its container's limit if that is lower."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(physical, int(cgroup_limit.read_text()))
    except (OSError, ValueError):  # no cgroup v2, or "max"
        return physical


def available_memory() -> int:
    """Return the bytes available without swapping: free ones and those of the page cache."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
