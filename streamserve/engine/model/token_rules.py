"""What changes a step's logits before its draws, all rows together: `RuleTensors` and `PenaltyCounts`.

Rules are biases, allowed ids and bad words. A sequence's rules are brought to the device once, and live there as long
as the rules do. A step then costs a few kernels, however many rows have rules and however long these are. Whether a bad
word is about to be completed is decided on the device, by the newest token, which the host may not
know yet: no step waits for it.

Penalties need how often each sequence's tokens have occurred, on the device, in the sequence's penalty slot. A slot is
begun with tokens from the host, once, and then takes each new token from the step's own input. So nothing waits, and a
step costs the same for the first token and for the thousandth. (Idea: vLLM V1's output bin counts.)

    seen     [ the prompt's tokens, each once | output tokens as they come | the first again, up to the end )
    counts   (vocab_size,) how often each token is in the output

Only the tokens in `seen` can be changed by a penalty: a few hundred of a vocabulary of a hundred thousand. A token that
is there twice is changed to the same value twice. Knows rows and `SampleSpec`s; no sequences. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch

from streamserve.engine.model.batch import on_device
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
            flat.index_add_(0, places, logits.new_full((len(places),), BAD_WORD))
        self._end_words(flat, specs, last_token_ids, vocab_size)

    def _end_words(
        self, flat: torch.Tensor, specs: Sequence[SampleSpec], last_token_ids: torch.Tensor, vocab_size: int
    ) -> None:
        """Avoid the last token of each bad word whose other tokens are the newest tokens."""
        endings = [(row, *pair) for row, spec in enumerate(specs) for pair in spec.bad_endings]
        if not endings:
            return
        rows, newest, following = on_device(endings, torch.int64, self._device).unbind(dim=1)
        is_begun = last_token_ids.index_select(0, rows) == newest
        flat.index_add_(0, rows * vocab_size + following, is_begun.to(flat.dtype) * BAD_WORD)

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


_LEAST_CAPACITY = 256


class PenaltyCounts:
    """A slot for each sequence with penalties. Memory grows with the highest slot and the longest sequence so far."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._seen = torch.zeros(0, _LEAST_CAPACITY, dtype=torch.int64, device=device)  # (num_slots, capacity)
        self._counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)  # (num_slots, vocab_size)
        self._num_seen: list[int] = []

    def update(self, specs: Sequence[SampleSpec], last_token_ids: torch.Tensor) -> None:
        """Count what is new before a draw. last_token_ids (num_rows,): the newest input token of each spec."""
        counting = [row for row, spec in enumerate(specs) if spec.penalty_slot is not None]
        for row in counting:
            if specs[row].prompt_token_ids:
                self._begin(specs[row])
        going_on = [row for row in counting if not specs[row].prompt_token_ids]
        if going_on:
            new = last_token_ids.index_select(0, on_device(going_on, torch.int64, self._device))
            self._add([specs[row].penalty_slot or 0 for row in going_on], new)

    def penalise(self, logits: torch.Tensor, specs: Sequence[SampleSpec]) -> None:
        """Change logits (num_rows, vocab_size): repetition over prompt and output, other penalties over the output."""
        rows = [row for row, spec in enumerate(specs) if spec.penalty_slot is not None]
        slots = [specs[row].penalty_slot or 0 for row in rows]
        samplings = [specs[row].sampling for row in rows]
        longest = max(self._num_seen[slot] for slot in slots)
        index = self._index(slots)
        seen = self._seen[:, :longest].index_select(0, index)  # (len(rows), longest)
        counts = self._counts.take(index[:, None] * self._vocab_size + seen)
        there = self._index(rows)[:, None] * self._vocab_size + seen
        values = logits.take(there)
        repetition = self._column([sampling.repetition_penalty for sampling in samplings])
        frequency = self._column([sampling.frequency_penalty for sampling in samplings])
        presence = self._column([sampling.presence_penalty for sampling in samplings])
        values = torch.where(values > 0, values / repetition, values * repetition)
        logits.put_(there, values - torch.where(counts > 0, frequency * counts + presence, 0.0))

    def _begin(self, spec: SampleSpec) -> None:
        assert spec.penalty_slot is not None
        slot, output = spec.penalty_slot, list(spec.output_token_ids)
        known = [*spec.prompt_token_ids, *output] if spec.sampling.repetition_penalty != 1.0 else output
        seen = list(dict.fromkeys(known))
        seen = seen or [spec.prompt_token_ids[0]]  # a token that no penalty changes: it is not in the output
        self._grow(slot + 1, len(seen) + 1)
        self._seen[slot].fill_(seen[0])
        self._seen[slot, : len(seen)] = self._index(seen)
        self._num_seen[slot] = len(seen)
        self._counts[slot].zero_()
        if output:
            ones = torch.ones(len(output), dtype=torch.int32, device=self._device)
            self._counts[slot].index_add_(0, self._index(output), ones)

    def _add(self, slots: list[int], token_ids: torch.Tensor) -> None:
        """Add one token to each of `slots`, which are different. token_ids (len(slots),)."""
        ends = [self._num_seen[slot] for slot in slots]
        self._grow(0, max(ends) + 1)
        index, capacity = self._index(slots), self._seen.shape[1]
        self._seen.put_(index * capacity + self._index(ends), token_ids)
        ones = torch.ones(len(slots), dtype=torch.int32, device=self._device)
        self._counts.view(-1).index_add_(0, index * self._vocab_size + token_ids, ones)
        for slot in slots:
            self._num_seen[slot] += 1

    def _grow(self, num_slots: int, capacity: int) -> None:
        """Make room, at least twice of what there was: growing is rare."""
        old_num, old_capacity = self._seen.shape
        if num_slots > old_num:
            more = max(num_slots, 2 * old_num) - old_num
            self._counts = torch.cat([self._counts, self._counts.new_zeros(more, self._vocab_size)])
            self._seen = torch.cat([self._seen, self._seen.new_zeros(more, old_capacity)])
            self._num_seen += [1] * more
        if capacity > old_capacity:
            more = max(capacity, 2 * old_capacity) - old_capacity
            self._seen = torch.cat([self._seen, self._seen[:, :1].expand(-1, more)], dim=1)

    def _index(self, numbers: Sequence[int]) -> torch.Tensor:
        return on_device(numbers, torch.int64, self._device)

    def _column(self, numbers: Sequence[float]) -> torch.Tensor:
        return on_device(numbers, torch.float32, self._device)[:, None]
