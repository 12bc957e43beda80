"""The types of a GGUF file's tensors: how many numbers a block holds, and in how many bytes.

A row of a tensor is a whole number of blocks, one after the other. (Numbers and sizes: `enum ggml_type` and
ggml-common.h of llama.cpp.) No torch: the header is checked with these before any weight is read.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorType:
    """How numbers are stored: `block_size` of them in `block_bytes` bytes."""

    name: str
    block_size: int
    block_bytes: int

    @property
    def is_quantized(self) -> bool:
        """Whether its numbers are rounded in groups."""
        return self.block_size > 1

    def num_bytes(self, num_weights: int) -> int:
        """Return what a tensor of so many numbers takes."""
        return num_weights // self.block_size * self.block_bytes


TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 2 + 16),
    3: TensorType("Q4_1", 32, 2 + 2 + 16),
    6: TensorType("Q5_0", 32, 2 + 4 + 16),
    7: TensorType("Q5_1", 32, 2 + 2 + 4 + 16),
    8: TensorType("Q8_0", 32, 2 + 32),
    12: TensorType("Q4_K", 256, 2 + 2 + 12 + 128),
    13: TensorType("Q5_K", 256, 2 + 2 + 12 + 32 + 128),
    14: TensorType("Q6_K", 256, 128 + 64 + 16 + 2),
    30: TensorType("BF16", 1, 2),
    39: TensorType("MXFP4", 32, 1 + 16),
}
# Types that exist and are not read, for messages.
OTHER_TYPES = {
    10: "Q2_K",
    11: "Q3_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
}
