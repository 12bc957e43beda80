"""Rounded weights of a model, kept in a file once they are packed: a restart reads them, and rounds nothing.

    [ magic | length and SHA-256 of the header | header: JSON | padding | parts, each at its offset ]

The file's name holds a hash of all that its bytes depend on: the model's files, the kind, the kernels' level and
sources, the sources of this package, and the versions of torch and transformers. A file that was cut, changed or made
by another version is not taken, and made anew. The folder belongs to our user alone.

The file is mapped where the system maps it in huge pages (mapped.py): a load copies nothing, and engines of one model
share the pages. Elsewhere parts are read into the arena's huge pages. Runs at load.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import stat
import struct
import time
import weakref
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

import torch

from streamserve.engine.model.linear.base import Linear
from streamserve.engine.model.linear.mapped import HUGE_PAGE, map_file
from streamserve.engine.model.linear.native import NativeLinear
from streamserve.native.build import is_private
from streamserve.native.library import Library

logger = logging.getLogger(__name__)

MAGIC = b"SSPACKS1"
SUFFIX, PART_SUFFIX = ".packs", ".part"
ALIGNMENT = 64
SAMPLE_BYTES = 4096  # of a part, whose checksum the header has: a file of zeros is found out
UNUSED_SECONDS = 90 * 86_400  # a file that no load has taken for so long goes when another is written
DISK_SHARE = 0.5  # of what is free: the most that a file takes
_START = struct.Struct("<8sQ32s")
Kept = tuple[str, tuple[int, int], torch.Tensor]  # kind, shape, bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A weight of `shape` (out_features, in_features) packed to `kind`, or a float32 tensor."""

    kind: str
    shape: tuple[int, int]
    begin: int
    num_bytes: int
    checksum: int


class Packs:
    """What one load takes out of the file and adds to it, by name. `save` writes it, if anything was added."""

    def __init__(self, folder: Path, model: str, fields: tuple[str, ...], library: Library, dtype: torch.dtype) -> None:
        """`model` names what a newer file takes the place of; `fields` are all that the weights depend on."""
        self.key = _hash(*fields, str(dtype), library.source, _sources(), torch.__version__, _transformers_version())
        self.file = folder / f"{_hash(model)}-{self.key}{SUFFIX}"
        self._library, self._dtype = library, dtype
        self._descriptor, self._parts = _open(self.file, self.key)
        self._map = None
        if self._descriptor is not None:
            self._map = map_file(self._descriptor, os.fstat(self._descriptor).st_size)
        self._taken: dict[str, Kept] = {}
        self._is_complete = True
        if self._descriptor is not None:
            weakref.finalize(self, os.close, self._descriptor)

    def layer(self, name: str, bias: torch.Tensor | None) -> NativeLinear | None:
        """Return a layer that is kept."""
        found = self._take(name, self._library.arena.take)
        if found is None:
            return None
        kind, shape, packed = found
        return NativeLinear(self._library, kind, packed, shape, bias, self._dtype)

    def add(self, name: str, layer: Linear) -> None:
        """Keep a layer, if it is packed."""
        if isinstance(layer, NativeLinear):
            self._add(name, layer.kind, (layer.out_features, layer.in_features), layer.packed)

    def tensor(self, name: str) -> torch.Tensor | None:
        """Return a float32 tensor that is kept."""
        found = self._take(name, lambda num_bytes: memoryview(bytearray(num_bytes)))
        return None if found is None else found[2].view(torch.float32).view(found[1])

    def add_tensor(self, name: str, tensor: torch.Tensor) -> None:
        """Keep a float32 tensor of two dimensions."""
        tensor = tensor.contiguous()
        self._add(name, "tensor", (tensor.shape[0], tensor.shape[1]), tensor.view(-1).view(torch.uint8))

    @property
    def is_mapped(self) -> bool:
        """Whether what is taken lies in pages of the file."""
        return self._map is not None

    @property
    def is_found(self) -> bool:
        """Whether an earlier load has left a file."""
        return bool(self._parts)

    def save(self) -> None:
        """Write the file and remove older ones of the model. What cannot be written is said in the log."""
        if self._is_complete:
            return
        num_bytes = sum(data.nbytes for _, _, data in self._taken.values())
        try:
            if not _make_private(self.file.parent):
                logger.warning("%s is not this user's alone: packed weights are not kept there", self.file.parent)
            elif num_bytes > DISK_SHARE * shutil.disk_usage(self.file.parent).free:
                logger.warning(
                    "Packed weights of %.1f GB are not kept: %s has too little room", num_bytes / 1e9, self.file.parent
                )
            else:
                self._write()
        except OSError as error:
            logger.warning("Packed weights are not kept: %s", error)

    def _add(self, name: str, kind: str, shape: tuple[int, int], data: torch.Tensor) -> None:
        self._taken[name] = kind, shape, data
        self._is_complete = False

    def _take(self, name: str, room_of: Callable[[int], memoryview]) -> Kept | None:
        part = self._parts.get(name)
        if part is None or self._descriptor is None:
            return None
        if self._map is not None:
            data = self._map[part.begin : part.begin + part.num_bytes]
        else:
            room = room_of(part.num_bytes)
            data = torch.frombuffer(room, dtype=torch.uint8)[: _read_whole(self._descriptor, room, part.begin)]
        if data.nbytes != part.num_bytes or zlib.crc32(_bytes(data)[:SAMPLE_BYTES]) != part.checksum:
            logger.warning("%s is damaged: its weights are packed anew", self.file)
            self._parts, self._is_complete = {}, False
            return None
        found = part.kind, part.shape, data
        self._taken[name] = found
        return found

    def _write(self) -> None:
        """Write beside the file, then rename. Another process that writes meanwhile is left to it."""
        folder = self.file.parent
        with (folder / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            for left in folder.glob(f"*{PART_SUFFIX}"):  # of a process that ended while it wrote
                left.unlink()
            part = self.file.with_suffix(PART_SUFFIX)
            try:
                with part.open("xb", buffering=0) as stream:
                    os.fchmod(stream.fileno(), 0o400)  # it may be mapped: nothing writes into it in place
                    self._write_parts(stream)
                    os.fsync(stream.fileno())
                part.replace(self.file)
            except OSError:
                part.unlink(missing_ok=True)
                raise
            for old in folder.glob(f"*{SUFFIX}"):
                is_older = old.name.split("-")[0] == self.file.name.split("-")[0] and old != self.file
                if is_older or old.stat().st_mtime < time.time() - UNUSED_SECONDS:
                    old.unlink()
        logger.info("Packed weights are kept in %s, %.2f GB", self.file, self.file.stat().st_size / 1e9)

    def _write_parts(self, stream: IO[bytes]) -> None:
        parts, begin = {}, 0  # from the end of the header on
        for name, (kind, shape, data) in self._taken.items():
            checksum = zlib.crc32(_bytes(data)[:SAMPLE_BYTES])
            parts[name] = Part(kind=kind, shape=shape, begin=begin, num_bytes=data.nbytes, checksum=checksum)
            begin += _padded(data.nbytes)
        header = json.dumps({"key": self.key, "num_bytes": begin, "parts": {n: asdict(p) for n, p in parts.items()}})
        text = header.encode()
        start = _START.pack(MAGIC, len(text), hashlib.sha256(text).digest()) + text
        pieces = [memoryview(start), *(_bytes(data) for _, _, data in self._taken.values())]
        _write_pages(stream, (one for piece in pieces for one in (piece, bytes(_padded(len(piece)) - len(piece)))))


def _open(file: Path, key: str) -> tuple[int | None, dict[str, Part]]:
    """Return the descriptor of a file that is whole, ours and of `key`, and its parts; else nothing."""
    if not is_private(file.parent):
        return None, {}
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None, {}
    try:
        parts = _parts_of(descriptor, key)
        os.utime(descriptor)
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        logger.warning("%s is not taken (%s): its weights are packed anew", file, error)
        os.close(descriptor)
        return None, {}
    return descriptor, parts


def _parts_of(descriptor: int, key: str) -> dict[str, Part]:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise ValueError("it is not our user's alone")
    magic, length, digest = _START.unpack(os.pread(descriptor, _START.size, 0))
    if magic != MAGIC or length > status.st_size:
        raise ValueError("it begins otherwise")
    text = os.pread(descriptor, length, _START.size)
    if hashlib.sha256(text).digest() != digest:
        raise ValueError("its header is damaged")
    header: dict[str, Any] = json.loads(text)
    first = _first(length)
    if header["key"] != key or first + header["num_bytes"] != status.st_size:
        raise ValueError("it is of another model, or cut")
    return {
        name: Part(**{**entry, "shape": tuple(entry["shape"]), "begin": first + entry["begin"]})
        for name, entry in header["parts"].items()
    }


def _read_whole(descriptor: int, room: memoryview, begin: int) -> int:
    """Fill `room` from byte `begin` on; return how much there was: one call reads 2 GB at most."""
    num_read = 0
    with suppress(OSError):
        while num_read < len(room):
            found = os.preadv(descriptor, [room[num_read:]], begin + num_read)
            if not found:
                break
            num_read += found
    return num_read


def _write_pages(stream: IO[bytes], pieces: Iterable[memoryview | bytes]) -> None:
    """Write pieces one after the other, in whole huge pages: so the system caches them, and maps them in such pages."""
    page, used = memoryview(bytearray(HUGE_PAGE)), 0
    for piece in pieces:
        at = 0
        while at < len(piece):
            num_bytes = min(len(piece) - at, HUGE_PAGE - used)
            page[used : used + num_bytes] = piece[at : at + num_bytes]
            at, used = at + num_bytes, used + num_bytes
            if used == HUGE_PAGE:
                _write_whole(stream, page)
                used = 0
    _write_whole(stream, page[:used])


def _write_whole(stream: IO[bytes], data: memoryview) -> None:
    while data:
        data = data[stream.write(data) :]


def _make_private(folder: Path) -> bool:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    return is_private(folder)


def _bytes(data: torch.Tensor) -> memoryview:
    return memoryview(data.numpy())


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _first(header_len: int) -> int:
    return _padded(_START.size + header_len)


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


@cache
def _sources() -> str:
    """Return a hash of the code that makes a model's layers."""
    root = Path(__file__).parents[1]
    return _hash(*(path.read_text() for path in sorted(root.rglob("*.py"))))


def _transformers_version() -> str:
    import transformers

    return str(transformers.__version__)
