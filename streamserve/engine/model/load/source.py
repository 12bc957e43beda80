"""What a load starts from: a model's files (a folder, a hub id downloaded to a folder, a GGUF file), and the memory.

Reads only safetensors, GGUF, JSON and text: no remote code, no pickles. No torch: the capacity command uses this too.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from streamserve.engine.model.load.errors import HubUnreachable as HubUnreachable
from streamserve.engine.model.load.errors import ModelLoadError as ModelLoadError
from streamserve.engine.model.load.errors import ModelNotFound as ModelNotFound
from streamserve.engine.model.load.errors import NoSafetensors as NoSafetensors
from streamserve.engine.model.load.errors import UnsupportedModel as UnsupportedModel
from streamserve.engine.model.load.gguf.config import config_of
from streamserve.engine.model.load.gguf.file import SUFFIX, GGUFFile
from streamserve.engine.plan import Progress, no_progress
from streamserve.protocol.requests import MODEL_DEFAULTS, RANGES

SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "tokenizer*")
# What a GGUF file calls a sampling parameter otherwise.
GGUF_SAMPLING = {"temperature": "temp", "repetition_penalty": "penalty_repeat"}
# Of Linux: which control groups a process is in, and their files.
CGROUPS_OF_PROCESS, CGROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".msgpack", ".h5", ".onnx")


def resolve(
    path: str, patterns: Sequence[str] = (*SMALL_FILES, "*.safetensors"), progress: Progress = no_progress
) -> Path:
    """Return the local folder of the model named `path`, or its GGUF file; downloads a hub id's files where it may.

    `progress` gets the bytes downloaded, on threads of the hub library; an exception of it ends the download.
    """
    folder = Path(path).expanduser()
    if folder.is_dir() or is_gguf(folder):
        return folder
    if folder.exists():
        raise ModelNotFound(
            f"{path} is a file. Name a .gguf file, or the folder that holds config.json and the .safetensors files."
        )
    if _looks_like_path(path):
        raise ModelNotFound(f"There is no folder at {path}. Check the path, or name a hub id such as org/model.")
    return _download(path, patterns, progress)


def find(path: str) -> Path | None:
    """Return the folder or file of the model named `path` if it is here, or was downloaded; downloads nothing."""
    folder = Path(path).expanduser()
    if folder.is_dir() or is_gguf(folder):
        return folder
    if folder.exists() or _looks_like_path(path):
        return None
    from huggingface_hub import try_to_load_from_cache

    try:
        file = try_to_load_from_cache(path, "config.json")
    except ValueError:  # no hub id either
        return None
    return Path(file).parent if isinstance(file, str) else None


def is_gguf(path: Path) -> bool:
    """Return whether a model is a GGUF file instead of a folder."""
    return path.suffix == SUFFIX and path.is_file()


def _looks_like_path(path: str) -> bool:
    return path.startswith(("/", ".", "~")) or path.count("/") > 1 or path.endswith(("/", SUFFIX))


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
            # One of its bars for bytes counts what came over the network: less, where the hub knows parts already.
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
    """Return the folder's weight files, or the GGUF file; refuse folders without any."""
    if is_gguf(folder):
        return [folder]
    found = sorted(folder.glob("*.safetensors"))
    if found:
        return found
    ggufs = sorted(file.name for file in folder.glob(f"*{SUFFIX}"))
    if ggufs:
        raise NoSafetensors(f"{folder} has no .safetensors file, but {ggufs[0]}: name the file, {folder / ggufs[0]}.")
    others = sorted(file.name for file in folder.iterdir() if file.suffix in OTHER_WEIGHTS)
    if others:
        raise NoSafetensors(
            f"{folder} has only {others[0]}; streamserve reads safetensors only. Convert it: load it with "
            "transformers where you trust the file and call save_pretrained()."
        )
    raise NoSafetensors(f"{folder} has no .safetensors file. Finish the download, or name another folder.")


def sampling_defaults(folder: Path) -> dict[str, float]:
    """Return the sampling defaults of generation_config.json, or the GGUF file, that the engine can compute with."""
    file = folder / "generation_config.json"
    given = json.loads(file.read_text()) if file.exists() else {}
    if is_gguf(folder):
        metadata = GGUFFile(folder).metadata
        found = {name: metadata.get(f"general.sampling.{GGUF_SAMPLING.get(name, name)}") for name in MODEL_DEFAULTS}
        given = {name: round(value, 6) for name, value in found.items() if isinstance(value, int | float)}  # fp32
    return {
        name: int(given[name]) if name == "top_k" else given[name]
        for name in MODEL_DEFAULTS
        if type(given.get(name)) in (int, float) and RANGES[name].low <= given[name] <= RANGES[name].high
    }


def read_config(folder: Path) -> dict[str, Any]:
    """Return the folder's config.json, unchanged; of a GGUF file what it would be."""
    if is_gguf(folder):
        return config_of(GGUFFile(folder))
    file = folder / "config.json"
    if not file.exists():
        raise ModelLoadError(f"{folder} has no config.json; so it is no model folder. Name the folder that has it.")
    return _parse(file, file.read_bytes())


def read_headers(folder: Path) -> list[dict[str, Any]]:
    """Return the headers of the folder's .safetensors files: tensor name -> dtype, shape, place. [] if none.

    Of a GGUF file: tensor name -> dtype, shape.
    """
    if is_gguf(folder):
        places = GGUFFile(folder).tensors.values()
        return [{place.name: {"dtype": place.type.name, "shape": list(place.shape)} for place in places}]
    return [_tensors(file) for file in sorted(folder.glob("*.safetensors"))]


def _tensors(file: Path) -> dict[str, Any]:
    """Return the header of a safetensors file, whose tensors all have a shape."""
    header = _parse(file, _header(file))
    for name, entry in header.items():
        if name != "__metadata__" and not (isinstance(entry, dict) and isinstance(entry.get("shape"), list)):
            raise ModelLoadError(f"{file} cannot be read ({name} has no shape). Copy or download it again.")
    return header


def read_header(file: Path) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file, and where the data begins after it."""
    header = _header(file)
    return _parse(file, header), 8 + len(header)


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
    if is_gguf(folder):
        status = folder.stat()
        digest.update(json.dumps([folder.name, status.st_size, status.st_mtime_ns]).encode())
        digest.update(GGUFFile(folder).header_bytes)
        return digest.hexdigest()
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


def total_memory(process: Path = CGROUPS_OF_PROCESS, root: Path = CGROUPS) -> int:
    """Return the RAM this process may use: the machine's, or the least limit of its control groups."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([physical, *(limit for _, limit in _limits(process, root))])


def memory_for(device: str) -> int:
    """Return the RAM that a model on this DEVICE may use; no bound where a GPU may hold it."""
    may_use_gpu = device != "cpu" and Path("/dev/nvidiactl").exists()
    return sys.maxsize if may_use_gpu else total_memory()


def available_memory(process: Path = CGROUPS_OF_PROCESS, root: Path = CGROUPS) -> int:
    """Return the bytes available without swapping, of the machine or of a control group: free, and the page cache."""
    free = _available_of_machine()
    for folder, limit in _limits(process, root):
        with suppress(OSError, ValueError, KeyError):
            is_new = (folder / "memory.current").exists()
            used = int((folder / ("memory.current" if is_new else "memory.usage_in_bytes")).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            names = [name if is_new else f"total_{name}" for name in ("inactive_file", "active_file")]
            free = min(free, limit - used + sum(int(stat[name]) for name in names))
    return max(0, free)


def _limits(process: Path, root: Path) -> Iterator[tuple[Path, int]]:
    """Yield each control group that bounds this process's memory, and its limit in bytes.

    A service of systemd is in a group of its own, whose parents bound it too; a container often sees its own as the
    root. Of version 1 the memory controller has a tree of its own.
    """
    try:
        lines = [line.split(":", 2) for line in process.read_text().splitlines()]
    except OSError:  # not Linux
        return
    for _, controllers, path in lines:
        if controllers == "":
            top, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            top, name = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        group = top / path.lstrip("/")
        for folder in (group, *group.parents) if group != top else (top,):
            with suppress(OSError, ValueError):  # none, not seen from here, or "max"
                yield folder, int((folder / name).read_text())
            if folder == top:
                break


def _available_of_machine() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
