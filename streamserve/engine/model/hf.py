"""`HFModel`: transformers' modelling code over our KV memory, for architectures that are no family of our decoder.

Its attention calls ours by transformers' `AttentionInterface`; its linear layers are ours. Engine thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from streamserve.engine.model.attention import AttentionKernels, PagedAttention
from streamserve.engine.model.batch import StepBatch
from streamserve.engine.model.kv_cache import KVCache


class HFModel:
    """A causal language model of transformers whose body and head are called apart."""

    def __init__(self, model: Any, attention: PagedAttention) -> None:
        """`model` attends by `attention`. One hook notes what its body gives to its head."""
        self.model, self.attention = model, attention
        self._body = model.get_decoder()
        self._output: Any = None
        self._inputs: dict[str, Any] = {}
        self._body.register_forward_hook(self._note)
        self.num_body_calls = 0

    def use(self, kernels: AttentionKernels | None) -> None:
        """Attend with kernels from now on."""
        self.attention.kernels = kernels

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights, the hidden states, and the KV memory."""
        return self.model.dtype

    @property
    def vocab_size(self) -> int:
        """Tokens that logits are of."""
        return int(self.model.get_output_embeddings().out_features)

    def _note(self, _module: Any, _inputs: Any, output: Any) -> None:
        self._output = output
        self.num_body_calls += 1

    def forward(self, kv: KVCache, batch: StepBatch) -> torch.Tensor:
        """Run the body on a batch, whose keys and values are stored in `kv`; return the hidden states (T, C)."""
        self._inputs = {"input_ids": batch.input_ids, "position_ids": batch.position_ids, "use_cache": False}
        with self.attention.step(kv, batch):
            self.model.base_model(**self._inputs)
        return self._output[0][0]

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return logits (n, V) of `rows` (n,) of the hidden states (T, C) that `forward` returned last.

        The model's own code runs the head: what it does to logits (a cap, a scale) is done here too.
        """
        assert hidden.data_ptr() == self._output[0].data_ptr()
        with self._body_returns(self._output):
            return self.model(**self._inputs, logits_to_keep=rows).logits[0]

    @contextmanager
    def _body_returns(self, output: Any) -> Iterator[None]:
        """Let the body of the model return `output`, whatever it is called with."""
        forward, has_own = self._body.forward, "forward" in vars(self._body)
        self._body.forward = lambda *_args, **_kwargs: output
        try:
            yield
        finally:
            if has_own:
                self._body.forward = forward
            else:
                del self._body.forward
