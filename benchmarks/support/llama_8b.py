"""A GGUF file of Llama 3 8B's shape with random Q4_0 blocks, written a tensor at a time: 4.6 GB of disk, little memory.

To measure what a load takes, not to be talked to. `layers` and `vocab_size` may be fewer, for tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

NAME = "llama-3-8b"
HIDDEN, INNER, NUM_LAYERS, VOCAB_SIZE = 4096, 14_336, 32, 128_256
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128
BLOCK, BLOCK_BYTES = 32, 18  # of Q4_0: a scale in half precision, and 32 numbers of 4 bits
SCALE = 0.005
BLOCKS_AT_ONCE = 1 << 20
Bytes = NDArray[np.uint8]


def write(path: Path, *, num_layers: int = NUM_LAYERS, vocab_size: int = VOCAB_SIZE) -> Path:
    """Write the file; return its path."""
    from gguf import GGMLQuantizationType, GGUFWriter

    writer = GGUFWriter(path, "llama")
    writer.add_block_count(num_layers)
    writer.add_context_length(8192)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500_000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    shapes = dict(tensors(num_layers, vocab_size))
    for name, shape in shapes.items():
        if len(shape) == 1:
            writer.add_tensor_info(name, shape, np.dtype(np.float32), 4 * prod(shape))
        else:
            stored = (shape[0], shape[1] // BLOCK * BLOCK_BYTES)
            kind = GGMLQuantizationType.Q4_0
            writer.add_tensor_info(name, stored, np.dtype(np.uint8), prod(stored), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    blocks = random_blocks()
    for shape in shapes.values():
        writer.write_tensor_data(
            np.ones(shape, np.float32) if len(shape) == 1 else matrix(blocks, prod(shape) // BLOCK)
        )
    writer.close()
    return path


def tensors(num_layers: int, vocab_size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes, rows first."""
    yield "token_embd.weight", (vocab_size, HIDDEN)
    yield "output.weight", (vocab_size, HIDDEN)
    yield "output_norm.weight", (HIDDEN,)
    for layer in range(num_layers):
        for name, shape in (
            ("attn_norm", (HIDDEN,)),
            ("attn_q", (NUM_HEADS * HEAD_DIM, HIDDEN)),
            ("attn_k", (NUM_KV_HEADS * HEAD_DIM, HIDDEN)),
            ("attn_v", (NUM_KV_HEADS * HEAD_DIM, HIDDEN)),
            ("attn_output", (HIDDEN, NUM_HEADS * HEAD_DIM)),
            ("ffn_norm", (HIDDEN,)),
            ("ffn_gate", (INNER, HIDDEN)),
            ("ffn_up", (INNER, HIDDEN)),
            ("ffn_down", (HIDDEN, INNER)),
        ):
            yield f"blk.{layer}.{name}.weight", shape


def random_blocks() -> Bytes:
    """Return blocks (BLOCKS_AT_ONCE, 18): a scale, and random numbers."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (BLOCKS_AT_ONCE, BLOCK_BYTES), dtype=np.uint8)
    scales = rng.uniform(0.5, 1.5, BLOCKS_AT_ONCE).astype(np.float16) * np.float16(SCALE)
    blocks[:, :2] = scales.astype(np.float16).view(np.uint8).reshape(-1, 2)
    return blocks


def matrix(blocks: Bytes, num_blocks: int) -> Bytes:
    """Return so many blocks, the same over and over again."""
    return np.resize(blocks, (num_blocks, BLOCK_BYTES))
