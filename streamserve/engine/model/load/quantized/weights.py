"""The weights of a folder that is quantised, under the names of the checkpoint that was quantised.

A weight is made of its parts when it is asked for: a layer at a time, so that the model is not in memory twice. Knows
names and formats; not what the weights are for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import prod

import torch

from streamserve.engine.model.decoder.checkpoint import HEADS, Checkpoint, LazyWeight, lacking
from streamserve.engine.model.linear.native import BYTES_PER_WEIGHT
from streamserve.engine.model.linear.packer import split_matrix_name
from streamserve.engine.model.load.quantized.integers import AWQMatrix, CompressedMatrix, GPTQMatrix
from streamserve.engine.model.load.quantized.mxfp4 import MXFP4Stack
from streamserve.engine.model.load.quantized.parts import Groups, Parts, StoredWeight
from streamserve.engine.model.load.quantized.scaled import DTYPES, ScaledMatrix
from streamserve.engine.model.load.quantized.scheme import Scheme

WEIGHT = ".weight"
Format = GPTQMatrix | AWQMatrix | CompressedMatrix | ScaledMatrix | MXFP4Stack
# The end of the name by which a weight is found -> the format, and the end of the weight's own name.
FOUND_BY: dict[str, tuple[type[Format], str]] = {
    ".qweight": (GPTQMatrix, WEIGHT),
    ".weight_packed": (CompressedMatrix, WEIGHT),
    "_blocks": (MXFP4Stack, ""),
    WEIGHT: (ScaledMatrix, WEIGHT),
}
# Scales of inputs and of cached keys: neither is rounded to 8 bits here.
LEFT_OUT = (".input_scale", ".input_scale_ub", ".input_zero_point", ".output_scale", ".k_scale", ".v_scale", ".q_scale")


class QuantizedCheckpoint:
    """All weights by the checkpoint's names; those that are quantised in `dtype`, those that are not as they are."""

    def __init__(self, checkpoint: Checkpoint, scheme: Scheme, dtype: torch.dtype | None = None) -> None:
        """Raise `ModelLoadError` for parts of a weight that are missing, or do not belong together."""
        self.checkpoint, self.scheme = checkpoint, scheme
        self.path, self.main_type, self.prefix = checkpoint.folder, scheme.title, checkpoint.prefix
        own = checkpoint.dtype()
        self._dtype = dtype or (torch.bfloat16 if own in DTYPES else own)
        self._stored = dict(self._weights())
        parts = set(self._parts())
        left = [name for name in checkpoint.names("") if name not in parts and not name.endswith(LEFT_OUT)]
        self._names = dict.fromkeys((*self._stored, *left))
        self.head_name = next((name for name in HEADS if name in self), None)

    def _weights(self) -> Iterator[tuple[str, Format]]:
        for name in self.checkpoint.names(""):
            for end, (kind, own_end) in FOUND_BY.items():
                if name.endswith(end) and self._is_stored(name, end):
                    base = name.removesuffix(end)
                    own = AWQMatrix if kind is GPTQMatrix and self.scheme.method == "awq" else kind
                    yield base + own_end, own(Parts(self.checkpoint, base), self.scheme)

    def _is_stored(self, name: str, end: str) -> bool:
        """Return whether a name that ends so is a quantised weight's."""
        dtype = self.checkpoint.place(name).dtype
        return dtype in DTYPES if end == WEIGHT else not dtype.is_floating_point

    def _parts(self) -> Iterator[str]:
        """Yield the names of the quantised weights' parts."""
        for name, weight in self._stored.items():
            yield from (name.removesuffix(WEIGHT) + suffix for suffix in weight.suffixes)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def names(self, prefix: str = "") -> Iterator[str]:
        """Yield the names that begin with `prefix`."""
        return (name for name in self._names if name.startswith(prefix))

    def require(self, names: Iterable[str]) -> None:
        """Raise `ModelLoadError` for names that the folder has no weight for."""
        missing = sorted(name for name in names if name not in self)
        if missing:
            raise lacking(self.path, missing)

    def dtype(self) -> torch.dtype:
        """Return the dtype that weights are dequantised to."""
        return self._dtype

    def tensor(self, name: str) -> torch.Tensor:
        """Return a weight."""
        return self._tensor(name, self._dtype)

    def floats(self, name: str) -> torch.Tensor:
        """Return a weight in float32."""
        return self._tensor(name, torch.float32).float()

    def _tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        stored = self._find(name)
        return self.checkpoint.tensor(name) if stored is None else stored.tensor(dtype)

    def kind(self, name: str) -> str | None:
        """Return what a weight's layer is packed to; None for a weight that is not quantised."""
        stored = self._find(name)
        return None if stored is None else stored.kind

    def groups(self, name: str) -> Groups | None:
        """Return a weight as groups of 32; None where they do not hold it as it is."""
        stored = self._find(name)
        return None if stored is None else stored.groups()

    def _find(self, name: str) -> StoredWeight | None:
        """Return a quantised weight, or an expert's matrix of one that has all experts'; None for another."""
        if name in self._stored:
            return self._stored[name]
        stack, expert, rows = split_matrix_name(name)
        found = self._stored.get(stack)
        return found.expert(expert, rows) if isinstance(found, MXFP4Stack) else None

    @property
    def is_quantized(self) -> bool:
        """Whether any weight is."""
        return bool(self._stored)

    def lazily(self) -> dict[str, LazyWeight]:
        """Return all weights, each read when it is indexed: what transformers takes as a state dict."""
        return {name: LazyWeight(self, name) for name in self._names}

    def num_bytes(self) -> int:
        """Return what all weights take when they are dequantised."""
        return self._bytes(lambda _weight: self._dtype.itemsize)

    def packed_bytes(self) -> int:
        """Return what all weights take when the quantised ones stay so."""
        return self._bytes(lambda weight: BYTES_PER_WEIGHT[weight.kind or "int8"])

    def _bytes(self, per_weight: Callable[[Format], float]) -> int:
        plain = sum(prod(self.checkpoint.place(name).shape) for name in self._names if name not in self._stored)
        stored = sum(prod(weight.shape) * per_weight(weight) for weight in self._stored.values())
        return int(plain * self._dtype.itemsize + stored)
