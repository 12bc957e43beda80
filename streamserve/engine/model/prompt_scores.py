"""Log-probabilities of tokens that are known already: a prompt's own, at each position of a chunk.

The body of the model runs once for the whole step. Its head runs again on a slice of the rows at a time, so that no
more than a few rows as wide as the vocabulary are in memory at once, whatever the prompt. Nothing here waits for a GPU.
(Idea: vLLM's prompt log-probabilities, and its lesson, issue 5907: rows for a whole prompt at once end the engine.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from streamserve.engine.model.batch import StepBatch, on_device
from streamserve.engine.model.language_model import LanguageModel
from streamserve.engine.plan import Chunk, RawLogprobs

# Of logits in single precision, at once.
_SLICE_BYTES = 32 * 1024 * 1024
_NAMES = ("scored_chosen", "scored_top", "scored_ids", "scored_finite")


@dataclass(frozen=True, slots=True)
class Scores:
    """The scored positions of a step, chunk after chunk: tensors still on the device.

    chosen (num_scored,); top and ids (num_scored, largest num_top); finite (num_scored,) bool.
    """

    chosen: torch.Tensor
    top: torch.Tensor
    ids: torch.Tensor
    finite: torch.Tensor

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by name."""
        return dict(zip(_NAMES, (self.chosen, self.top, self.ids, self.finite), strict=True))

    @staticmethod
    def by_sequence(
        arrived: Mapping[str, torch.Tensor], chunks: Sequence[Chunk]
    ) -> dict[int, tuple[RawLogprobs, ...] | None]:
        """Bring scores to Python numbers, for each chunk with scores; None for a chunk whose logits are not finite."""
        if _NAMES[0] not in arrived:
            return {}
        chosen, top, ids, finite = (arrived[name].tolist() for name in _NAMES)
        found: dict[int, tuple[RawLogprobs, ...] | None] = {}
        first = 0
        for chunk in chunks:
            if chunk.scores is None:
                continue
            end, num_top = first + len(chunk.scores.token_ids), chunk.scores.num_top
            found[chunk.seq_id] = None
            if all(finite[first:end]):
                found[chunk.seq_id] = tuple(
                    RawLogprobs(chosen=chosen[row], top=tuple(zip(ids[row][:num_top], top[row][:num_top], strict=True)))
                    for row in range(first, end)
                )
            first = end
        return found


def score(model: LanguageModel, hidden: torch.Tensor, batch: StepBatch) -> Scores:
    """Score what the chunks of a batch ask for. `hidden` (num_tokens, hidden_size) is what the model's body gave."""
    rows, token_ids, num_top = _wanted(batch)
    device = batch.input_ids.device
    size = max(1, _SLICE_BYTES // (4 * model.vocab_size))
    parts = []
    for first in range(0, len(rows), size):
        index = on_device(rows[first : first + size], torch.int64, device)
        targets = on_device(token_ids[first : first + size], torch.int64, device)
        parts.append(_score_rows(model.logits(hidden, index).float(), targets, num_top))  # (num_rows, vocab_size)
    return Scores(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def _wanted(batch: StepBatch) -> tuple[list[int], list[int], int]:
    """Return the rows to score, the token after each, and the most candidates that a chunk wants."""
    rows: list[int] = []
    token_ids: list[int] = []
    num_top = 0
    for chunk, last_row in zip(batch.chunks, batch.last_rows, strict=True):
        if chunk.scores is not None:
            first = last_row + 1 - len(chunk.token_ids) + chunk.scores.first - chunk.start
            rows += range(first, first + len(chunk.scores.token_ids))
            token_ids += chunk.scores.token_ids
            num_top = max(num_top, chunk.scores.num_top)
    return rows, token_ids, num_top


def _score_rows(
    logits: torch.Tensor, targets: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    finite = torch.isfinite(logits.amax(dim=-1))
    total = logits.logsumexp(dim=-1, keepdim=True)  # (num_rows, 1)
    top = logits.topk(min(num_top, logits.shape[1]), dim=-1)
    chosen = logits.gather(1, targets[:, None]) - total
    return chosen[:, 0], top.values - total, top.indices, finite
