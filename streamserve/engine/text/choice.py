"""`Choice`: the text side of one sequence. Token ids go in, `Token` events come out, stop strings are found.

Runs on any thread of the client but the engine thread; knows no core. A choice that is given the ids readers have
already received continues in the state it had then, and yields only what is new.
"""

from __future__ import annotations

from streamserve.engine.output import SequenceUpdate
from streamserve.engine.plan import RawLogprobs
from streamserve.engine.text.detokenizer import StopStrings, make_detokenizer
from streamserve.engine.text.tokenizer import Tokenizer
from streamserve.protocol.events import PositionLogprobs, Token, TokenLogprob
from streamserve.protocol.requests import SamplingParams


class Choice:
    """One of a request's answers as text. `finish_reason` is set once it is over; `stopped_at` if by a stop string.

    `stopped_at` is the number of output tokens to keep, the one that completed the stop string included; the caller
    stops the core's sequence there.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        *,
        index: int = 0,
        shown_token_ids: tuple[int, ...] = (),
        strip_leading_space: bool = False,
    ) -> None:
        self.index = index
        self.finish_reason: str | None = None
        self.stopped_at: int | None = None
        self.num_tokens = 0
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._detokenizer = make_detokenizer(tokenizer, strip_leading_space=strip_leading_space)
        self._stop = StopStrings(sampling.stop) if sampling.stop else None
        for token_id in shown_token_ids:
            if self.stopped_at is None:
                self._feed(token_id)

    def push(self, update: SequenceUpdate) -> Token | None:
        """Take an update; return its tokens and the text they release, or None if there is neither."""
        if self.finish_reason is not None:
            return None
        text, num_kept = self._feed_all(update)
        # The last token and the end come together: an end without a token repeats one that was shown before a resume.
        if update.finish_reason is not None and update.token_ids and self.stopped_at is None:
            text += self._flush()
        self.finish_reason = update.finish_reason if self.stopped_at is None else "stop"
        if not text and not num_kept:
            return None
        token_ids = update.token_ids[:num_kept]
        return Token(text=text, token_ids=token_ids, choice=self.index, logprobs=self._logprobs(update, token_ids))

    def _feed_all(self, update: SequenceUpdate) -> tuple[str, int]:
        """Feed tokens up to a stop string; return the text and how many tokens count."""
        text = ""
        for num_fed, token_id in enumerate(update.token_ids):
            if self.stopped_at is not None:
                return text, num_fed
            is_end = update.finish_reason == "stop" and not update.is_complete
            if is_end and num_fed == len(update.token_ids) - 1:
                self.num_tokens += 1  # the eos or stop token: counted, no part of the text
            else:
                text += self._feed(token_id)
        return text, len(update.token_ids)

    def _feed(self, token_id: int) -> str:
        self.num_tokens += 1
        text = self._detokenizer.feed(token_id)
        if self._stop is None:
            return text
        if self.num_tokens <= self._sampling.min_tokens:
            return self._stop.feed_unchecked(text)
        return self._filter(self._stop, text)

    def _flush(self) -> str:
        text = self._detokenizer.flush()
        if self._stop is None:
            return text
        text = self._filter(self._stop, text)
        return text if self.stopped_at is not None else text + self._stop.flush()

    def _filter(self, stop: StopStrings, text: str) -> str:
        text = stop.feed(text)
        if stop.is_found:
            self.stopped_at = self.num_tokens
        return text

    def _logprobs(self, update: SequenceUpdate, token_ids: tuple[int, ...]) -> tuple[PositionLogprobs, ...] | None:
        if self._sampling.logprobs is None:
            return None
        pairs = zip(token_ids, update.logprobs, strict=False)
        return tuple(self._position(token_id, raw) for token_id, raw in pairs if raw is not None)

    def _position(self, token_id: int, raw: RawLogprobs) -> PositionLogprobs:
        top = tuple(self._candidate(other, logprob) for other, logprob in raw.top)
        return PositionLogprobs(chosen=self._candidate(token_id, raw.chosen), top=top)

    def _candidate(self, token_id: int, logprob: float) -> TokenLogprob:
        data = self._tokenizer.token_bytes(token_id)
        return TokenLogprob(token_id=token_id, token=data.decode(errors="replace"), bytes_=data, logprob=logprob)
