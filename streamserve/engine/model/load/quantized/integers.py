"""GPTQ, AWQ and compressed-tensors' pack-quantized: whole numbers in words of 32 bits, a scale and a zero for a group.

    w[o, i] = scale[o, g] * (q[o, i] - zero[o, g])      g = g_idx[i], else i // group_size

    q of                    words                                in a word
    GPTQ                    qweight (in / n, out)                n inputs, the first in the lowest bits
    AWQ                     qweight (in, out / 8)                outputs 0 2 4 6 1 3 5 7
    compressed-tensors      weight_packed (out, in / n)          n inputs

n = 32 / bits. Zeros of the first two are packed in qzeros (groups, out / n) like AWQ's and GPTQ's outputs; those of
compressed-tensors in weight_zero_point (out / n, groups), absent: 2^(bits - 1). GPTQ's first version stores zero - 1.
With `desc_act` a group's inputs are anywhere in a row (g_idx).

Groups of a multiple of 32 inputs, in order, are int4 as our kernels have it: minimum = -scale * zero. Others become
int8, by rounding. (Sources: the papers, arXiv 2210.17323 and 2306.00978; AutoGPTQ's and AutoAWQ's `pack`;
compressed_tensors/compressors/quantized_compressors/pack_quantized.py.)
"""

from __future__ import annotations

from functools import cached_property

import torch

from streamserve.engine.model.load.quantized.parts import GROUP, Groups, Parts, as_halves, by_rows, repeated
from streamserve.engine.model.load.quantized.scheme import Scheme

WORD = 32
# Where output k of a word is in AWQ's order.
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


class IntegerMatrix:
    """A matrix of whole numbers. Kinds of files differ in `_numbers`, `_zeros` and `_scales`, of some rows each."""

    suffixes: tuple[str, ...]
    shape: tuple[int, int]
    group_size: int

    def __init__(self, parts: Parts, bits: int) -> None:
        self.parts, self.bits, self.per_word = parts, bits, WORD // bits

    @property
    def kind(self) -> str:
        """int4 where groups of 32 hold it as it is."""
        fits = self.bits <= 4 and self._group_of is None and self._has_whole_groups
        return "int4" if fits else "int8"

    @property
    def _has_whole_groups(self) -> bool:
        return self.group_size % GROUP == 0 or self.group_size == self.shape[1]

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight."""
        return by_rows(self.shape, dtype, self._rows)

    def _rows(self, first: int, last: int) -> torch.Tensor:
        numbers, zeros, scales = self._numbers(first, last).float(), self._zeros(first, last), self._scales(first, last)
        groups = self._group_of
        if groups is not None:
            return (numbers - zeros[:, groups]) * scales[:, groups]
        numbers = numbers.view(last - first, self._num_groups, self.group_size)
        return numbers.sub_(zeros[:, :, None]).mul_(scales[:, :, None]).flatten(1)

    def groups(self) -> Groups | None:
        """Return q, scales and minima, or of 8 bits q and scales."""
        if self._group_of is not None or not self._has_whole_groups:
            return None
        num_rows, num_inputs = self.shape
        scales, zeros, q = self._scales(0, num_rows), self._zeros(0, num_rows), self._numbers(0, num_rows)
        if self.bits <= 4:
            factors = as_halves(scales, -scales * zeros)
        else:
            factors = as_halves(scales)
            signed = (
                q.short()
                - repeated(zeros, num_inputs, self.group_size).short().repeat_interleave(GROUP, dim=1)[:, :num_inputs]
            )
            if int(signed.abs().max()) > 127:
                return None
            q = signed.to(torch.int8)
        if factors is None:
            return None
        return (q, *(repeated(part, num_inputs, self.group_size) for part in factors))

    @cached_property
    def _group_of(self) -> torch.Tensor | None:
        """The group of each input (in,), where they are not in order."""
        name = next((name for name in (".g_idx", ".weight_g_idx") if self.parts.has(name)), None)
        if name is None:
            return None
        found = self.parts.tensor(name).long()
        if bool((found < 0).any()):  # compressed-tensors: not set
            return None
        if int(found.max()) >= self._num_groups:
            raise self.parts.broken(f"has an input of group {int(found.max())}, and {self._num_groups} groups")
        in_order = torch.arange(self.shape[1]) // self.group_size
        return None if torch.equal(found, in_order) else found

    @property
    def _num_groups(self) -> int:
        return -(-self.shape[1] // self.group_size)

    def _check_groups(self, given: int | None) -> None:
        """Take the size of a group from the scheme; raise where inputs are no whole number of groups."""
        self.group_size = given or self.shape[1]
        if self.shape[1] % self.group_size:
            raise self.parts.broken(f"has {self.shape[1]} inputs, which groups of {self.group_size} do not divide")

    def _numbers(self, first: int, last: int) -> torch.Tensor:
        raise NotImplementedError

    def _zeros(self, first: int, last: int) -> torch.Tensor:
        raise NotImplementedError

    def _scales(self, first: int, last: int) -> torch.Tensor:
        raise NotImplementedError


class GPTQMatrix(IntegerMatrix):
    """GPTQ's."""

    suffixes = (".qweight", ".qzeros", ".scales", ".g_idx")

    def __init__(self, parts: Parts, scheme: Scheme) -> None:
        super().__init__(parts, scheme.bits)
        self.zero_offset = scheme.zero_offset
        num_words, num_rows = _matrix(parts, ".qweight")
        self.shape = (num_rows, num_words * self.per_word)
        self._check_groups(scheme.group_size)
        if num_rows % self.per_word:
            raise parts.broken(f"has {num_rows} outputs, which are no whole words of {self.per_word}")
        parts.require(".scales", (self._num_groups, num_rows))
        parts.require(".qzeros", (self._num_groups, num_rows // self.per_word))
        if parts.has(".g_idx"):
            parts.require(".g_idx", (self.shape[1],))

    def _numbers(self, first: int, last: int) -> torch.Tensor:
        fields = unpacked(self.parts.tensor(".qweight")[:, first:last], self.bits)  # (in / n, out, n)
        return fields.permute(1, 0, 2).reshape(last - first, self.shape[1])

    def _zeros(self, first: int, last: int) -> torch.Tensor:
        words = self.parts.tensor(".qzeros")[:, first // self.per_word : last // self.per_word]
        zeros = unpacked(words, self.bits).flatten(1).t()
        # A zero of 0 is stored as -1, of which there are `bits` bits.
        return ((zeros.short() + self.zero_offset) & (2**self.bits - 1)).float()

    def _scales(self, first: int, last: int) -> torch.Tensor:
        return self.parts.tensor(".scales")[:, first:last].t().float()


class AWQMatrix(IntegerMatrix):
    """AWQ's, as its gemm kernels have it."""

    suffixes = (".qweight", ".qzeros", ".scales")

    def __init__(self, parts: Parts, scheme: Scheme) -> None:
        super().__init__(parts, scheme.bits)
        num_inputs, num_words = _matrix(parts, ".qweight")
        self.shape = (num_words * self.per_word, num_inputs)
        self._check_groups(scheme.group_size)
        parts.require(".scales", (self._num_groups, self.shape[0]))
        parts.require(".qzeros", (self._num_groups, num_words))

    def _numbers(self, first: int, last: int) -> torch.Tensor:
        return self._outputs(".qweight", first, last)

    def _zeros(self, first: int, last: int) -> torch.Tensor:
        return self._outputs(".qzeros", first, last).float()

    def _scales(self, first: int, last: int) -> torch.Tensor:
        return self.parts.tensor(".scales")[:, first:last].t().float()

    def _outputs(self, suffix: str, first: int, last: int) -> torch.Tensor:
        words = self.parts.tensor(suffix)[:, first // self.per_word : last // self.per_word]
        return unpacked(words, self.bits)[:, :, AWQ_PLACES].flatten(1).t().contiguous()


class CompressedMatrix(IntegerMatrix):
    """compressed-tensors' pack-quantized; numbers and zeros are stored 2^(bits - 1) higher, which does not matter."""

    suffixes = (".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_g_idx", ".weight_shape")

    def __init__(self, parts: Parts, _scheme: Scheme) -> None:
        num_rows, num_words = _matrix(parts, ".weight_packed")
        parts.require(".weight_shape", (2,))
        rows, num_inputs = (int(size) for size in parts.tensor(".weight_shape"))
        bits = next((bits for bits in (2, 4, 8) if -(-num_inputs * bits // WORD) == num_words), None)
        if rows != num_rows or bits is None:
            raise parts.broken(f"of the shape ({rows}, {num_inputs}) has words of the shape ({num_rows}, {num_words})")
        super().__init__(parts, bits)
        self.shape = (rows, num_inputs)
        scale_rows, num_groups = _matrix(parts, ".weight_scale")
        if scale_rows != rows or num_inputs % num_groups:
            raise parts.broken(f"of the shape {self.shape} has scales of the shape ({scale_rows}, {num_groups})")
        self._check_groups(num_inputs // num_groups)
        if parts.has(".weight_zero_point"):
            parts.require(".weight_zero_point", (-(-rows // self.per_word), num_groups))

    def _numbers(self, first: int, last: int) -> torch.Tensor:
        words = self.parts.tensor(".weight_packed")[first:last]
        return unpacked(words, self.bits).flatten(1)[:, : self.shape[1]]

    def _zeros(self, first: int, last: int) -> torch.Tensor:
        if not self.parts.has(".weight_zero_point"):
            return torch.full((last - first, self._num_groups), 2.0 ** (self.bits - 1))
        words = self.parts.tensor(".weight_zero_point")[first // self.per_word : -(-last // self.per_word)]
        return unpacked(words, self.bits).permute(0, 2, 1).flatten(0, 1)[: last - first].float()

    def _scales(self, first: int, last: int) -> torch.Tensor:
        return self.parts.tensor(".weight_scale")[first:last].float()


def unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the numbers of int32 words (m, n), the lowest bits first: (m, n, 32 / bits), uint8."""
    octets = words.contiguous().view(torch.uint8).view(*words.shape, 4, 1)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    return ((octets >> shifts) & (2**bits - 1)).flatten(2)


def _matrix(parts: Parts, suffix: str) -> tuple[int, int]:
    """Return the shape of a part that is a matrix."""
    shape = parts.shape(suffix)
    if len(shape) != 2 or 0 in shape:
        raise parts.broken(f"has {suffix.strip('._')} of the shape {shape}, which is no matrix")
    return shape[0], shape[1]
