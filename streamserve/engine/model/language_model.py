"""What a runner needs of a language model: its body over paged memory, and its head."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from streamserve.engine.model.batch import StepBatch
from streamserve.engine.model.kv_cache import KVCache


class LanguageModel(Protocol):
    """A model in memory: our `Decoder`, or transformers' code in an `HFModel`."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights, the hidden states, and the KV memory."""
        ...

    @property
    def vocab_size(self) -> int:
        """Tokens that logits are of."""
        ...

    def use(self, kernels: Any) -> None:
        """Compute with these kernels from now on; None: with torch."""
        ...

    def forward(self, kv: KVCache, batch: StepBatch) -> torch.Tensor:
        """Run the body on a batch, whose keys and values are stored in `kv`; return the hidden states (T, C)."""
        ...

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return logits (n, V) of `rows` (n,) of the hidden states that `forward` returned last."""
        ...
