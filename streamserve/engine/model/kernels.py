"""The native kernels as functions of tensors: attention over block tables, the writing of keys and values, draws.

Each computes what a function of this folder does with torch, which is its reference and serves where there is no
library. Tensors are on the CPU. Knows addresses and sizes; no sequences. Engine thread.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from functools import cache

import torch

from streamserve.engine.model.kv_cache import SCALE_BYTES
from streamserve.native.build import NativeUnavailable
from streamserve.native.library import Library, open_library

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # DType of native/src/types.h
ACTIVATIONS = {"silu": 0, "swish": 0, "gelu": 1, "gelu_pytorch_tanh": 2, "relu": 3}  # of native/src/step_parts.h

_logger = logging.getLogger(__name__)
_pointer, _int, _float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class _DecodeCall(ctypes.Structure):
    """`DecodeCall` of native/src/abi.h."""

    _fields_ = (
        *((name, _pointer) for name in ("query", "out", "keys", "values", "positions", "tables", "sinks")),
        *((name, _int) for name in ("query_row_stride", "query_head_stride", "table_stride", "num_slots")),
        *((name, _int) for name in ("num_rows", "num_heads", "num_kv_heads", "key_dim", "value_dim", "block_size")),
        ("window", _int),
        ("is_int8", _int),
        ("scaling", _float),
        ("softcap", _float),
    )


class _PromptCall(ctypes.Structure):
    """`PromptCall` of native/src/abi.h."""

    _fields_ = (
        *((name, _pointer) for name in ("query", "out", "keys", "values", "table", "sinks")),
        *((name, _int) for name in ("query_row_stride", "query_head_stride", "num_slots", "start")),
        *((name, _int) for name in ("num_rows", "num_heads", "num_kv_heads", "key_dim", "value_dim", "block_size")),
        ("window", _int),
        ("is_int8", _int),
        ("scaling", _float),
        ("softcap", _float),
    )


class _DrawCall(ctypes.Structure):
    """`DrawCall` of native/src/abi.h."""

    _fields_ = (
        *((name, _pointer) for name in ("logits", "shapes", "keys", "token_ids", "is_finite")),
        *((name, _int) for name in ("num_rows", "vocab_size", "row_stride")),
    )


class Kernels:
    """The functions of one library. `num_threads` of each call are torch's."""

    def __init__(self, library: Library) -> None:
        self.library = library

    def write_slots(self, pool: torch.Tensor, slots: torch.Tensor, vectors: torch.Tensor) -> None:
        """Store vectors (num_heads, num_tokens, dim) at slots (num_tokens,) of pool (num_heads, num_slots, dim)."""
        assert vectors.dtype == pool.dtype
        if vectors.stride(2) != 1:
            vectors = vectors.contiguous()
        num_heads, num_tokens, dim = vectors.shape
        size = vectors.element_size()
        head_stride, token_stride = vectors.stride(0) * size, vectors.stride(1) * size
        self.library.write_slots(
            vectors.data_ptr(), token_stride, head_stride, pool.data_ptr(), pool.shape[1],
            slots.data_ptr(), num_tokens, num_heads, dim * size,
        )  # fmt: skip

    def attend_decodes(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        positions: torch.Tensor,
        block_tables: torch.Tensor,
        block_size: int,
        *,
        scaling: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One query per row, each over its own blocks. query (Hq, S, D), pools (Hkv, num_slots, dim) -> (S, Hq, Dv).

        Pools of the query's dtype, or int8 (see `KVCache`).
        positions (S,) are those of the queries, whose keys are stored; block_tables (S, num_blocks).
        """
        num_kv_heads, num_slots, value_dim = _shape_of(values, query.dtype)
        if query.stride(2) != 1:
            query = query.contiguous()
        num_heads, num_rows, key_dim = query.shape
        out = query.new_empty(num_rows, num_heads, value_dim)
        sinks = None if sinks is None else sinks.float().contiguous()
        call = _DecodeCall(
            query.data_ptr(), out.data_ptr(), keys.data_ptr(), values.data_ptr(), positions.data_ptr(),
            block_tables.data_ptr(), None if sinks is None else sinks.data_ptr(),
            query.stride(1), query.stride(0), block_tables.stride(0), num_slots,
            num_rows, num_heads, num_kv_heads, key_dim, value_dim, block_size,
            window or 0, keys.dtype is torch.int8, scaling, softcap or 0.0,
        )  # fmt: skip
        self.library.attend_decodes(ctypes.byref(call), DTYPES[query.dtype], torch.get_num_threads())
        return out

    def attend_prompt(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        start: int,
        block_table: torch.Tensor,
        block_size: int,
        *,
        scaling: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """A sequence's tokens from position `start` on, each over what is before it and itself, in its blocks.

        query (Hq, T, D), pools (Hkv, num_slots, dim) -> (T, Hq, Dv). Keys and values of the tokens are stored already.
        block_table (num_blocks,). A token's numbers are bitwise those of `attend_decodes`.
        """
        num_kv_heads, num_slots, value_dim = _shape_of(values, query.dtype)
        if query.stride(2) != 1:
            query = query.contiguous()
        num_heads, num_rows, key_dim = query.shape
        out = query.new_empty(num_rows, num_heads, value_dim)
        sinks = None if sinks is None else sinks.float().contiguous()
        call = _PromptCall(
            query.data_ptr(), out.data_ptr(), keys.data_ptr(), values.data_ptr(), block_table.data_ptr(),
            None if sinks is None else sinks.data_ptr(), query.stride(1), query.stride(0), num_slots, start,
            num_rows, num_heads, num_kv_heads, key_dim, value_dim, block_size,
            window or 0, keys.dtype is torch.int8, scaling, softcap or 0.0,
        )  # fmt: skip
        self.library.attend_prompt(ctypes.byref(call), DTYPES[query.dtype], torch.get_num_threads())
        return out

    def draw(
        self, logits: torch.Tensor, shapes: Sequence[tuple[float, float, float]], keys: Sequence[tuple[int, int, int]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw from each row of float32 logits (num_rows, vocab_size): token ids (num_rows,), and which are finite.

        shapes are each row's (temperature, top_p, min_p), a temperature of 0 greedy; keys each row's (top_k, and the
        two numbers of `sampler.row_key`).
        """
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        num_rows, vocab_size = logits.shape
        shape_table = torch.tensor(shapes, dtype=torch.float32)
        key_table = torch.tensor(keys, dtype=torch.int64)
        token_ids = torch.empty(num_rows, dtype=torch.int64)
        is_finite = torch.empty(num_rows, dtype=torch.bool)
        call = _DrawCall(
            logits.data_ptr(), shape_table.data_ptr(), key_table.data_ptr(), token_ids.data_ptr(),
            is_finite.data_ptr(), num_rows, vocab_size, logits.stride(0),
        )  # fmt: skip
        self.library.draw(ctypes.byref(call), torch.get_num_threads())
        return token_ids, is_finite


def _shape_of(pool: torch.Tensor, dtype: torch.dtype) -> tuple[int, int, int]:
    """Return heads, slots and dim of a pool of `dtype`, or of an int8 pool."""
    num_heads, num_slots, dim = pool.shape
    if pool.dtype is torch.int8:
        return num_heads, num_slots, dim - SCALE_BYTES
    assert pool.dtype == dtype
    return num_heads, num_slots, dim


def open_kernels(on_progress: Callable[[float], None] = lambda _fraction: None) -> Kernels | None:
    """Return the kernels for this machine, compiled if they are not there yet; None, and a warning, without any."""
    try:
        return Kernels(_library(on_progress))
    except NativeUnavailable as error:
        _warn(str(error))
        return None


@cache
def _warn(reason: str) -> None:
    """Say once that a slower path serves."""
    _logger.warning(
        "Native kernels are off: %s. Without them a step takes several times as long.",
        reason,
    )


_opened: list[Library] = []


def _library(on_progress: Callable[[float], None]) -> Library:
    if not _opened:
        _opened.append(open_library(compiles=True, on_progress=on_progress))
    return _opened[0]
