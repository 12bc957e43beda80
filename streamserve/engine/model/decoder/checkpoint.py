"""The weights of a model folder, mapped from its safetensors files: nothing is read before it is used.

Each tensor has a map of its own, and lets go of it: no page of a weight that is packed stays in memory. Knows names,
shapes and dtypes; not what they are for. (The format: https://huggingface.co/docs/safetensors, "Format".)

    [ 8 bytes: length of the header | header: JSON, name -> dtype, shape, data_offsets | data ]
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch

from streamserve.engine.model.load.source import ModelLoadError, NoSafetensors, read_header, require_safetensors

INDEX = "model.safetensors.index.json"
# Where the embedding of a language model is: alone, in a causal model, and in a model of several kinds of input.
EMBEDDINGS = (
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
    "embed_tokens.weight",
)
HEADS = ("lm_head.weight", "language_model.lm_head.weight")
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
SMALL_BYTES = 1 << 16  # read, not mapped: thousands of norms are not thousands of maps
NUM_SHOWN = 3


class UnlikeSpec(Exception):
    """The files hold other weights than the decoder's spec has a place for."""


class Weights(Protocol):
    """The weights of a decoder by name: of a folder, quantised or not, or of a GGUF file.

    `prefix` stands before the names of the body's.
    """

    prefix: str
    head_name: str | None

    def __contains__(self, name: str) -> bool: ...

    def names(self, prefix: str) -> Iterator[str]:
        """Yield the names that begin with `prefix`."""
        ...

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor on the CPU."""
        ...

    def dtype(self) -> torch.dtype:
        """Return the dtype to compute in where none is asked for."""
        ...

    def require(self, names: Iterable[str]) -> None:
        """Raise `ModelLoadError` for names that are not there."""
        ...


@dataclass(frozen=True, slots=True)
class LazyWeight:
    """A weight that is read when it is indexed: what transformers takes in a state dict."""

    weights: Weights
    name: str

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return the weight, or a part of it."""
        return self.weights.tensor(self.name)[index]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor is."""

    file: Path
    begin: int
    num_bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class Checkpoint:
    """All tensors of a folder by name. `prefix` stands before the names of the decoder's own."""

    def __init__(self, folder: Path) -> None:
        """Read the files' headers; raise `ModelLoadError` for a file that is missing or broken."""
        self.folder = folder
        self._places: dict[str, Place] = {}
        for file in weight_files(folder):
            self._places |= places(file)
        embedding = next((name for name in EMBEDDINGS if name in self), None)
        if embedding is None:
            raise UnlikeSpec("no embedding under a name that is known")
        self.prefix = embedding.removesuffix("embed_tokens.weight")
        self.head_name = next((name for name in HEADS if name in self), None)

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def names(self, prefix: str) -> Iterator[str]:
        """Yield the names that begin with `prefix`."""
        return (name for name in self._places if name.startswith(prefix))

    def place(self, name: str) -> Place:
        """Return where a tensor is, with its shape and dtype."""
        return self._places[name]

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor: a map of its part of the file, or a copy where it is small."""
        place = self._places[name]
        with place.file.open("rb") as stream:
            if place.num_bytes < SMALL_BYTES:
                stream.seek(place.begin)
                return torch.frombuffer(bytearray(stream.read(place.num_bytes)), dtype=place.dtype).view(place.shape)
            skipped = place.begin % mmap.ALLOCATIONGRANULARITY
            # Private: what is written into it stays in this process. (Nothing is; torch asks for memory that could be.)
            mapped = mmap.mmap(
                stream.fileno(), skipped + place.num_bytes, access=mmap.ACCESS_COPY, offset=place.begin - skipped
            )
        count = place.num_bytes // place.dtype.itemsize
        return torch.frombuffer(mapped, dtype=place.dtype, count=count, offset=skipped).view(place.shape)

    def dtype(self) -> torch.dtype:
        """Return the dtype of the embedding."""
        return self._places[f"{self.prefix}embed_tokens.weight"].dtype

    def require(self, names: Iterable[str]) -> None:
        """Raise `ModelLoadError` for names that no file has."""
        missing = sorted(name for name in names if name not in self)
        if missing:
            raise lacking(self.folder, missing)


def places(file: Path) -> dict[str, Place]:
    """Return where the tensors of a safetensors file are, but for those of types that torch does not have."""
    header, first = read_header(file)
    size, found = file.stat().st_size, {}
    try:
        for name, entry in header.items():
            if name == "__metadata__" or entry["dtype"] not in DTYPES:
                continue
            begin, end = entry["data_offsets"]
            place = Place(file, first + begin, end - begin, tuple(entry["shape"]), DTYPES[entry["dtype"]])
            if place.num_bytes != prod(place.shape) * place.dtype.itemsize or not 0 <= begin <= end <= size - first:
                raise ValueError(f"{name} is not where its header says")
            found[name] = place
    except (ValueError, KeyError, TypeError) as error:
        raise ModelLoadError(f"{file} cannot be read ({error}). Copy or download it again.") from error
    return found


def lacking(folder: Path, names: list[str]) -> ModelLoadError:
    """Return the error for weights that no file has."""
    shown = ", ".join(names[:NUM_SHOWN])
    return ModelLoadError(
        f"{folder} lacks {len(names)} of its weights ({shown}{', …' if len(names) > NUM_SHOWN else ''}). "
        "Finish the download, or copy all of its files."
    )


def weight_files(folder: Path) -> list[Path]:
    """Return the folder's weight files; raise where its index names one that is not there."""
    index = folder / INDEX
    if not index.exists():
        return require_safetensors(folder)
    try:
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise ModelLoadError(f"{index} cannot be read ({error}). Copy or download it again.") from error
    missing = [file for file in files if not (folder / file).exists()]
    if missing:
        raise NoSafetensors(f"{folder} lacks {', '.join(missing)}. Finish the download, or copy all of its files.")
    return [folder / file for file in files]
