"""`RuleTensors`: biases, allowed ids and bad words of a step's draws, applied to all rows together.

The rules of a sequence are brought to the device once, and live there as long as the rules do. A step then costs a few
kernels, however many rows have rules and however long these are. Whether a bad word is about to be completed is decided
on the device, by the newest token: that may be one which the host does not know yet, so that no step waits for it.
Knows `SampleSpec`s; no sequences. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

from streamserve.engine.model.load.device import on_device
from streamserve.engine.plan import SampleSpec, TokenRules

# Added to the logit of what completes a bad word. Finite: where nothing else may be chosen, the likeliest still is.
BAD_WORD = -1e30


@dataclass(frozen=True, slots=True)
class _OnDevice:
    """The rules of one sequence: ids and values."""

    bias_ids: torch.Tensor
    bias: torch.Tensor
    allowed_ids: torch.Tensor
    bad_ids: torch.Tensor


class RuleTensors:
    """The rules of all sequences that have some."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: WeakKeyDictionary[TokenRules, _OnDevice] = WeakKeyDictionary()

    def apply(self, logits: torch.Tensor, specs: Sequence[SampleSpec], last_token_ids: torch.Tensor) -> None:
        """Change logits (num_rows, vocab_size), which are contiguous. last_token_ids (num_rows,): the newest tokens."""
        found = [(row, self._of(spec.rules)) for row, spec in enumerate(specs) if spec.rules is not None]
        flat, vocab_size = logits.view(-1), logits.shape[1]
        biased = [(row, one) for row, one in found if len(one.bias_ids)]
        if biased:
            places = self._places([(row, one.bias_ids) for row, one in biased], vocab_size)
            flat.index_add_(0, places, torch.cat([one.bias for _, one in biased]))
        limited = [(row, one.allowed_ids) for row, one in found if len(one.allowed_ids)]
        if limited:
            places = self._places(limited, vocab_size)
            values = flat.index_select(0, places)
            logits.index_fill_(0, on_device([row for row, _ in limited], torch.int64, self._device), float("-inf"))
            flat.index_copy_(0, places, values)
        bad = [(row, one.bad_ids) for row, one in found if len(one.bad_ids)]
        if bad:
            places = self._places(bad, vocab_size)
            flat.index_add_(0, places, torch.full((len(places),), BAD_WORD, device=self._device))
        self._end_words(flat, specs, last_token_ids, vocab_size)

    def _end_words(
        self, flat: torch.Tensor, specs: Sequence[SampleSpec], last_token_ids: torch.Tensor, vocab_size: int
    ) -> None:
        """Avoid the last token of each bad word whose other tokens are the newest ones."""
        endings = [(row, *pair) for row, spec in enumerate(specs) for pair in spec.bad_endings]
        if not endings:
            return
        rows, newest, following = on_device(endings, torch.int64, self._device).unbind(dim=1)
        is_begun = last_token_ids.index_select(0, rows) == newest
        flat.index_add_(0, rows * vocab_size + following, torch.where(is_begun, BAD_WORD, 0.0))

    def _places(self, ids: list[tuple[int, torch.Tensor]], vocab_size: int) -> torch.Tensor:
        """Return where these ids of these rows are in the flat logits."""
        counts = [len(one) for _, one in ids]
        starts = on_device([row * vocab_size for row, _ in ids], torch.int64, self._device)
        repeats = on_device(counts, torch.int64, self._device)
        starts = starts.repeat_interleave(repeats, output_size=sum(counts))
        return starts + torch.cat([one for _, one in ids])

    def _of(self, rules: TokenRules) -> _OnDevice:
        known = self._known.get(rules)
        if known is None:
            known = self._known[rules] = _OnDevice(
                bias_ids=on_device([token_id for token_id, _ in rules.logit_bias], torch.int64, self._device),
                bias=on_device([bias for _, bias in rules.logit_bias], torch.float32, self._device),
                allowed_ids=on_device(sorted(set(rules.allowed_token_ids)), torch.int64, self._device),
                bad_ids=on_device(rules.bad_token_ids(), torch.int64, self._device),
            )
        return known
