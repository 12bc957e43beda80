"""`Choice`: the text side of one sequence. Token ids go in, `Token` events come out, stop strings are found.

Where the model marks thoughts and tool calls, `formats/` finds them, and the events of their blocks come out too.

Runs on any thread of the client but the engine thread; knows no core. A choice that is given the ids readers have
already received continues in the state it had then, and yields only what is new.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from streamserve.engine.output import SequenceUpdate
from streamserve.engine.plan import RawLogprobs
from streamserve.engine.text.formats.base import AnswerSource, BlockWriter
from streamserve.engine.text.tokenizer import StopStrings, Tokenizer, make_detokenizer
from streamserve.protocol.events import Event, PositionLogprobs, Token, TokenLogprob
from streamserve.protocol.requests import SamplingParams

_PROMPT_CANDIDATES = 256  # tokens that one event names for the prompt


class Choice:
    """One of a request's answers as text. `finish_reason` is set once it is over; `stopped_at` if by a stop string.

    `stopped_at` is the number of output tokens to keep, the token that completed the stop string included; the caller
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
        source: AnswerSource | None = None,
        replay: bool = False,
    ) -> None:
        self.index = index
        self.replayed: list[Event] = []  # with `replay`, the events of the shown ids
        self.finish_reason: str | None = None
        self.stopped_at: int | None = None
        self.num_tokens = 0
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._strip = strip_leading_space
        self._detokenizer = make_detokenizer(tokenizer, strip_leading_space=strip_leading_space)
        self._stop = StopStrings(sampling.stop, is_kept=sampling.include_stop) if sampling.stop else None
        self._source = source
        self._token_ids: list[int] = []  # with blocks: all of them, to find the end's events again
        self._writer = None if source is None else BlockWriter(source, self._stop, choice=index)
        for token_id in shown_token_ids:
            if self.stopped_at is not None:
                break
            events = self._events_of(token_id)
            if replay:
                self.replayed += events

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended it."""
        return None if self._stop is None or self.stopped_at is None else self._stop.found

    @property
    def num_reasoning_tokens(self) -> int:
        """How many of the tokens stand in thinking blocks."""
        return 0 if self._writer is None else self._writer.num_reasoning_tokens

    def _events_of(self, token_id: int) -> list[Event]:
        """Feed one id that readers were shown; return its events."""
        if self._writer is not None:
            return self._feed_block(self._writer, token_id)
        return [Token(text=self._feed(token_id), token_ids=(token_id,), choice=self.index)]

    def push(self, update: SequenceUpdate) -> list[Event]:
        """Take an update; return its tokens and the text they release, and the blocks that begin and end."""
        if self.finish_reason is not None:
            return []
        if self._writer is not None:
            return self._push_blocks(self._writer, update)
        text, num_kept = self._feed_all(update)
        # The last token and the end come together: an end without a token repeats an end that was shown before a
        # resume.
        if update.finish_reason is not None and update.token_ids and self.stopped_at is None:
            text += self._flush()
        self.finish_reason = update.finish_reason if self.stopped_at is None else "stop"
        if not text and not num_kept:
            return []
        token_ids = update.token_ids[:num_kept]
        logprobs = self._logprobs(update, token_ids)
        return [Token(text=text, token_ids=token_ids, choice=self.index, logprobs=logprobs)]

    def _push_blocks(self, writer: BlockWriter, update: SequenceUpdate) -> list[Event]:
        """Take an update of an answer in blocks."""
        if len(update.token_ids) == 1 and update.finish_reason is None and self._sampling.logprobs is None:
            events = self._feed_block(writer, update.token_ids[0])
            if self.stopped_at is not None:
                self.finish_reason = "stop"
            return events
        events = []
        is_end = update.finish_reason is not None
        for number, token_id in enumerate(update.token_ids, 1):
            is_last = is_end and number == len(update.token_ids)
            is_eos = is_last and update.finish_reason == "stop" and not update.is_complete
            events += self._feed_block(
                writer, token_id, is_last=is_last, is_eos=is_eos, is_cut=update.finish_reason != "stop"
            )
            if self.stopped_at is not None:
                break
        if is_end and not update.token_ids:
            events = self._end_again(update)
        self._set_finish_reason(writer, update.finish_reason)
        return self._joined(events, update)

    def _set_finish_reason(self, writer: BlockWriter, reason: str | None) -> None:
        if self.stopped_at is not None:
            self.finish_reason = "stop"
        elif reason == "stop" and writer.num_calls:
            self.finish_reason = "tool_calls"
        else:
            self.finish_reason = reason

    def _feed_block(
        self, writer: BlockWriter, token_id: int, *, is_last: bool = False, is_eos: bool = False, is_cut: bool = False
    ) -> list[Event]:
        """Return the events of one id; the events of the last id end the answer, which `is_cut` or was ended."""
        self.num_tokens += 1
        self._token_ids.append(token_id)
        text = self._end_text(token_id) if is_eos else self._text_of(token_id)
        if is_last and not is_eos:
            text += self._detokenizer.flush()
        is_checked = self.num_tokens > self._sampling.min_tokens
        if is_last:
            events = writer.finish(token_id, text, is_checked=is_checked, is_cut=is_cut)
        else:
            events = writer.feed(token_id, text, is_checked=is_checked)
        if writer.is_stopped:
            self.stopped_at = self.num_tokens
            events += writer.close()
        return events

    def _text_of(self, token_id: int) -> str:
        """Return the text that is certain now, a tag as its character."""
        assert self._source is not None
        mark = self._source.tags.marks.get(token_id)
        if mark is None:
            return self._decode(token_id)
        return self._detokenizer.flush() + mark  # half a code point before a tag is no text

    def _end_again(self, update: SequenceUpdate) -> list[Event]:
        """Return the events of the end that come after the last token's own: readers were shown that token."""
        if not self._token_ids:
            return []
        shown, last = tuple(self._token_ids[:-1]), self._token_ids[-1]
        again = Choice(
            self._tokenizer,
            self._sampling,
            index=self.index,
            shown_token_ids=shown,
            strip_leading_space=self._strip,
            source=self._source,
        )
        reason = update.finish_reason if self.stopped_at is None else "length"  # it completed the stop string
        events = again.push(replace(update, token_ids=(last,), logprobs=(), finish_reason=reason))
        places = [place for place, event in enumerate(events) if isinstance(event, Token) and event.token_ids]
        return events[places[-1] + 1 :]

    def _joined(self, events: list[Event], update: SequenceUpdate) -> list[Event]:
        """Return the events with neighbouring tokens of one block as one event, and the tokens' log-probabilities."""
        out: list[Event] = []
        for event in events:
            last = out[-1] if out else None
            if isinstance(event, Token) and isinstance(last, Token) and last.index == event.index:
                out[-1] = replace(last, text=last.text + event.text, token_ids=last.token_ids + event.token_ids)
            else:
                out.append(event)
        if self._sampling.logprobs is None:
            return out
        num_before = 0
        for place, event in enumerate(out):
            if isinstance(event, Token):
                at = slice(num_before, num_before + len(event.token_ids))
                part = replace(update, token_ids=update.token_ids[at], logprobs=update.logprobs[at])
                out[place] = replace(event, logprobs=self._logprobs(part, event.token_ids))
                num_before = at.stop
        return out

    def prompt_events(self, scored: Sequence[tuple[int, RawLogprobs]]) -> list[Event]:
        """Return the events that show these tokens of the prompt, each of bounded size."""
        num = max(1, _PROMPT_CANDIDATES // self._sampling.num_prompt_candidates)
        return [
            self._prompt_event(self._position(token_id, raw) for token_id, raw in scored[first : first + num])
            for first in range(0, len(scored), num)
        ]

    def first_event(self, token_id: int) -> Token:
        """Return the event that shows the prompt's first token, which has no log-probability."""
        chosen = replace(self._candidate(token_id, 0.0), logprob=None)
        return self._prompt_event([PositionLogprobs(chosen=chosen)])

    def _prompt_event(self, positions: Iterable[PositionLogprobs]) -> Token:
        return Token(text="", token_ids=(), choice=self.index, logprobs=tuple(positions))

    def _feed_all(self, update: SequenceUpdate) -> tuple[str, int]:
        """Feed tokens up to a stop string; return the text and how many tokens count."""
        text = ""
        for num_fed, token_id in enumerate(update.token_ids):
            if self.stopped_at is not None:
                return text, num_fed
            is_end = update.finish_reason == "stop" and not update.is_complete
            if is_end and num_fed == len(update.token_ids) - 1:
                self.num_tokens += 1  # the eos or stop token: counted, no part of the text
                end = self._end_text(token_id)
                text += end if not end or self._stop is None else self._stop.flush() + end
            else:
                text += self._feed(token_id)
        return text, len(update.token_ids)

    def _end_text(self, token_id: int) -> str:
        """Return the text of the token that ends the answer: none, unless what ends it is kept."""
        is_tag = self._source is not None and token_id in self._source.tags.marks
        if is_tag or not self._sampling.include_stop:
            return ""
        return self._decode(token_id)

    def _decode(self, token_id: int) -> str:
        """Return the text that is certain now; a special token, where they are shown, stands for its own."""
        if self._sampling.skip_special_tokens or not self._tokenizer.is_special(token_id):
            return self._detokenizer.feed(token_id)
        return self._detokenizer.flush() + self._tokenizer.token_bytes(token_id).decode(errors="replace")

    def _feed(self, token_id: int) -> str:
        self.num_tokens += 1
        text = self._decode(token_id)
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
