"""Embeddings: a table of a vector for each token, plain or as the rows of a packed weight.

    vectors = table(token_ids)      (num_tokens,) -> (num_tokens, C), in the model's dtype

Where a model's head has the same weight, the packed head is the only copy: its rows are read out of its panels. Engine
thread.
"""

from __future__ import annotations

import torch
from torch.nn.functional import embedding

from streamserve.engine.model.linear.native import DTYPES, KINDS, NativeLinear


class Table:
    """Rows of a plain weight (num_rows, C)."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight, self.dtype = weight, weight.dtype
        self.num_rows, self.row_len = weight.shape

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Map (num_tokens,) to (num_tokens, C)."""
        return embedding(token_ids, self.weight)


class PackedTable:
    """Rows of `layer`'s weight: of a head, or packed for this alone."""

    def __init__(self, layer: NativeLinear) -> None:
        self.layer, self.dtype = layer, layer.dtype
        self.num_rows, self.row_len = layer.out_features, layer.in_features

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Map (num_tokens,) to (num_tokens, C)."""
        layer, token_ids = self.layer, token_ids.contiguous()
        vectors = torch.empty(len(token_ids), layer.in_features, dtype=self.dtype)
        layer.library.linear_rows(
            KINDS[layer.kind], layer.packed.data_ptr(), layer.out_features, layer.in_features, token_ids.data_ptr(),
            len(token_ids), DTYPES[self.dtype], vectors.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return vectors
