"""A GGUF file by its header: metadata, and where each tensor is. Weights stay in the file until they are used.

    [ "GGUF" | version | number of tensors | number of entries | entries: key, type, value … |
      tensors: name, dimensions, type, offset … | padding | data: the tensors, each at its offset ]

All is little-endian. Nothing here trusts the file: each length is compared with what is left of it before it is read,
and every tensor must lie inside. (The format: docs/gguf.md of the ggml project.) No torch: the capacity command and the
tokenizer use this too.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from streamserve.engine.model.load.errors import ModelLoadError
from streamserve.engine.model.load.gguf.types import OTHER_TYPES, TYPES, TensorType

SUFFIX = ".gguf"
MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4

_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


class BrokenGGUF(ModelLoadError):
    """The file is no GGUF file, or not all of it."""


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor is in the file, and how it is stored. `shape` in torch's order: rows first."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    begin: int
    num_bytes: int


class GGUFFile:
    """A file's metadata and table of tensors. Lists of strings (the vocabulary) are read when they are asked for."""

    def __init__(self, path: Path) -> None:
        """Read the header. Raises `ModelLoadError` naming the file, the tensor and its type, and the way out."""
        self.path = path
        self.size = path.stat().st_size
        if self.size < len(MAGIC):
            raise _broken(path, "it is empty or cut short")
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            reader = _Reader(path, data)
            num_tensors, num_entries = reader.beginning()
            self.metadata: dict[str, Any] = {}
            for _ in range(num_entries):
                key = reader.string()
                self.metadata[key] = reader.value(reader.number(_U32))
            self._refuse_parts()
            places = [reader.tensor() for _ in range(num_tensors)]
            self.header_bytes = bytes(data[: reader.position])
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise _broken(path, f"its alignment is {alignment!r}")
        first = -(-len(self.header_bytes) // alignment) * alignment
        self.tensors = {place.name: self._placed(place, first) for place in places}

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    @property
    def architecture(self) -> str:
        """Return llama.cpp's name of the architecture; "" where the file has none."""
        return str(self.metadata.get("general.architecture", ""))

    def get(self, key: str, default: Any = None) -> Any:
        """Return an entry of the architecture: `get("block_count")` is "llama.block_count" of a Llama."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def strings(self, key: str) -> list[str]:
        """Return a list of strings of the metadata, [] where there is none."""
        found = self.metadata.get(key)
        return found.read(self.header_bytes) if isinstance(found, _Strings) else []

    def main_type(self) -> str:
        """Return the name of the type that most of the weights have."""
        counts: dict[str, int] = {}
        for place in self.tensors.values():
            counts[place.type.name] = counts.get(place.type.name, 0) + prod(place.shape)
        return max(counts, key=counts.__getitem__, default="")

    def _refuse_parts(self) -> None:
        num_parts = self.metadata.get("split.count", 0)
        if isinstance(num_parts, int) and num_parts > 1:
            raise ModelLoadError(
                f"{self.path} is part {int(self.metadata.get('split.no', 0)) + 1} of {num_parts} of a model. Join the "
                "parts with llama.cpp's llama-gguf-split --merge, and name the file that it writes."
            )

    def _placed(self, place: TensorPlace, first: int) -> TensorPlace:
        begin = first + place.begin
        if begin + place.num_bytes > self.size:
            raise _broken(
                self.path,
                f"{place.name} ({place.type.name}) ends at byte {begin + place.num_bytes:,}, and the file has "
                f"{self.size:,}",
            )
        return TensorPlace(place.name, place.shape, place.type, begin, place.num_bytes)


@dataclass(frozen=True, slots=True)
class _Strings:
    """A list of strings that lies in the header, `count` from byte `begin` on."""

    begin: int
    count: int

    def __len__(self) -> int:
        return self.count

    def read(self, header: bytes) -> list[str]:
        found, position = [], self.begin
        for _ in range(self.count):
            (length,) = _U64.unpack_from(header, position)
            position += 8
            found.append(header[position : position + length].decode(errors="replace"))
            position += length
        return found


class _Reader:
    """Reads a header from front to back."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.position = path, data, 0

    def beginning(self) -> tuple[int, int]:
        """Return the numbers of tensors and of entries."""
        magic = self.take(len(MAGIC))
        if magic != MAGIC:
            raise _broken(self.path, f"it begins with {magic!r} instead of {MAGIC!r}")
        version = self.number(_U32)
        if version not in VERSIONS:
            kind = "it is big-endian" if version >> 16 else f"its version is {version}"
            raise ModelLoadError(
                f"{self.path} is not read: {kind}, and little-endian files of versions {VERSIONS} are. "
                "Convert the model with a current llama.cpp."
            )
        return self.number(_U64), self.number(_U64)

    def take(self, num_bytes: int) -> bytes:
        end = self.position + num_bytes
        if end > len(self.data):
            raise _broken(self.path, f"its header ends at byte {len(self.data):,}, inside an entry")
        found = self.data[self.position : end]
        self.position = end
        return found

    def number(self, kind: struct.Struct) -> Any:
        return kind.unpack(self.take(kind.size))[0]

    def string(self) -> str:
        return self.take(self.number(_U64)).decode(errors="replace")

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array(self.number(_U32), self.number(_U64))
        raise _broken(self.path, f"an entry has the unknown type {kind}")

    def array(self, kind: int, count: int) -> Any:
        if kind in _SCALARS:
            scalar = _SCALARS[kind]
            return [value for (value,) in scalar.iter_unpack(self.take(count * scalar.size))]
        if kind != _STRING:
            raise _broken(self.path, f"an entry is a list of values of type {kind}")
        begin = self.position
        for _ in range(count):
            length = self.number(_U64)
            if length > len(self.data) - self.position:
                self.take(length)  # raises
            self.position += length
        return _Strings(begin, count)

    def tensor(self) -> TensorPlace:
        """Return a tensor's place, `begin` counted from the beginning of the data."""
        name = self.string()
        num_dimensions = self.number(_U32)
        if num_dimensions > MAX_DIMENSIONS:
            raise _broken(self.path, f"{name} has {num_dimensions} dimensions")
        shape = tuple(reversed([self.number(_U64) for _ in range(num_dimensions)]))
        number, begin = self.number(_U32), self.number(_U64)
        kind = TYPES.get(number)
        if kind is None:
            raise ModelLoadError(
                f"{self.path} is not read: {name} is stored as {OTHER_TYPES.get(number, f'type {number}')}. Known are "
                f"{', '.join(known.name for known in TYPES.values())}: take the file of the model in Q4_K_M or Q8_0."
            )
        if shape and shape[-1] % kind.block_size:
            raise _broken(self.path, f"a row of {name} has {shape[-1]} numbers, and {kind.name} has {kind.block_size}")
        return TensorPlace(name, shape, kind, begin, kind.num_bytes(prod(shape)))


def _broken(path: Path, reason: str) -> BrokenGGUF:
    return BrokenGGUF(f"{path} cannot be read as a GGUF file: {reason}. Copy or download it again.")
