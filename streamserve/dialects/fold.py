"""The one fold of an answer: a log's events become pieces, and pieces become the whole answer. Pure.

    events, from seq 1 ──► Fold.feed ──► pieces ─┬─► a dialect's frames     streamed (encoder.py)
                                                 └─► Answer ─► its JSON     whole

A piece is an event with what came before it in the log: which block a token is of, the number of a call, where in the
content a source is cited. Dialects read pieces and answers, and decide only how they look; so what is streamed and what
is whole are two views of the same pieces. CONTRIBUTING.md says how a dialect is added.

It knows no dialect, no JSON and no ids of frames.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from io import StringIO
from typing import Any, NamedTuple

from streamserve.protocol.errors import StreamserveError, error_for
from streamserve.protocol.events import (
    SUCCESS_REASONS,
    TEXT,
    Approval,
    BlockStart,
    BlockStop,
    BlockText,
    ChoiceDone,
    ChoiceText,
    Citation,
    Custom,
    Done,
    Error,
    Event,
    LoggedEvent,
    Meta,
    PositionLogprobs,
    Snapshot,
    State,
    Status,
    Token,
    Usage,
)
from streamserve.protocol.json_patch import json_text, patched

THINKING, TOOL_USE = "thinking", "tool_use"
# The statuses of a pipeline's run: a step begins; `trim` has left something out.
STEP, TRIMMED = "step", "trimmed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A block of a choice.

    `call` numbers the calls of the choice from 0; None for other kinds. `begin` is how many characters of the choice's
    content precede a text block; None for other kinds. `is_implied`: it is of text and had no start.
    """

    choice: int
    index: int
    kind: str = TEXT
    id: str | None = None
    name: str | None = None
    call: int | None = None
    begin: int | None = None
    is_implied: bool = False


class PromptScored(NamedTuple):
    """Log-probabilities of the prompt's next tokens, of all choices."""

    positions: tuple[PositionLogprobs, ...]


class BlockBegun(NamedTuple):
    """A block begins. The implied text block of a plain answer has no such piece."""

    block: Block


class Delta(NamedTuple):
    """More of a block: text, ids and log-probabilities, each of which may be empty."""

    block: Block
    token: Token


class BlockEnded(NamedTuple):
    """A block is whole."""

    block: Block
    signature: str | None


class Cited(NamedTuple):
    """A source is cited. `places`: each choice that it is of, and from where to where in the choice's content.

    The place is empty, at the content's end so far, for a citation of the choice as a whole.
    """

    citation: Citation
    places: Mapping[int, tuple[int, int]]


class ChoiceEnded(NamedTuple):
    """A choice is whole. Each choice of a successful answer has exactly one such piece."""

    choice: int
    finish_reason: str
    stop_string: str | None


class Succeeded(NamedTuple):
    """The last piece of a whole answer."""

    done: Done


class Failed(NamedTuple):
    """The last piece of any other answer: the error that it ended in."""

    code: str
    message: str
    retryable: bool = False

    def error(self) -> StreamserveError:
        """Return the error, with the status of its code."""
        return error_for(self.code, self.message, retryable=self.retryable)


# `Meta`, `Status`, `State`, `Custom` and `Approval` are pieces as they are.
Piece = (
    Meta
    | Status
    | State
    | Custom
    | PromptScored
    | BlockBegun
    | Delta
    | BlockEnded
    | Cited
    | Approval
    | ChoiceEnded
    | Succeeded
    | Failed
)

# `cancelled` and `abandoned` are finish reasons that only the native dialect has. They fail the answer, with these
# messages: a client that took them for success would keep half an answer as a whole answer.
_FAILED_MESSAGES = {
    "cancelled": "The stream was stopped before the answer was complete.",
    "abandoned": "The stream ended because it had no reader for too long.",
}
# The end for readers who cannot be asked to connect again: only a whole answer ends without an error.
GOING_DOWN = Failed("engine_unavailable", "The server is shutting down.", retryable=True)


@dataclass(slots=True)
class _Choice:
    """A choice so far, without its text."""

    blocks: dict[int, Block] = field(default_factory=dict)
    num_calls: int = 0
    num_chars: int = 0  # of its text blocks
    is_ended: bool = False


class Fold:
    """Makes pieces of the events of one log, which it is fed from seq 1, in order. It holds counts, and no text.

    An answer has `n` choices. The record of a finished stream has lost that number, so further choices may be met.
    """

    def __init__(self, n: int = 1) -> None:
        self._choices = {number: _Choice() for number in range(n)}
        self._num_asked = n
        self._has_token_ids = True
        self._num_prompt = self._num_cached = self._num_completion = self._num_reasoning = 0

    @property
    def usage(self) -> Usage:
        """The counts of all choices so far. Text of a stream without token ids counts as one token an event."""
        return Usage(
            prompt_tokens=self._num_prompt,
            completion_tokens=self._num_completion,
            cached_tokens=self._num_cached,
            reasoning_tokens=self._num_reasoning,
        )

    def feed(self, event: Event) -> list[Piece]:
        """Return the event's pieces: none for an event that adds nothing, several for an end."""
        if isinstance(event, Token):
            return [self._token(event)]
        if isinstance(event, BlockStart):
            return [BlockBegun(self._begin(event))]
        if isinstance(event, BlockStop):
            return [BlockEnded(self._block(event.choice, event.index), event.signature)]
        if isinstance(event, Citation):
            return [Cited(event, self._places(event))]
        if isinstance(event, ChoiceDone):
            return self._end_choice(ChoiceEnded(event.choice, event.finish_reason, event.stop_string))
        if isinstance(event, Meta):
            self._has_token_ids = event.has_token_ids
            self._num_prompt, self._num_cached = event.prompt_tokens, event.cached_tokens
            return [event]
        if isinstance(event, Error):
            return [Failed(event.code, event.message, event.retryable)]
        if isinstance(event, Done):
            return self._end(event)
        return [event] if isinstance(event, Status | State | Custom | Approval) else []

    def _choice(self, number: int) -> _Choice:
        choice = self._choices.get(number)
        if choice is None:
            choice = self._choices[number] = _Choice()
        return choice

    def _block(self, number: int, index: int) -> Block:
        """Return a block that has begun; without a start it is of text."""
        choice = self._choice(number)
        block = choice.blocks.get(index)
        if block is None:
            block = choice.blocks[index] = Block(
                choice=number, index=index, begin=None if index else 0, is_implied=True
            )
        return block

    def _begin(self, start: BlockStart) -> Block:
        choice = self._choice(start.choice)
        call = None
        if start.kind == TOOL_USE:
            call, choice.num_calls = choice.num_calls, choice.num_calls + 1
        block = choice.blocks[start.index] = Block(
            choice=start.choice,
            index=start.index,
            kind=start.kind,
            id=start.id,
            name=start.name,
            call=call,
            begin=choice.num_chars if start.kind == TEXT else None,
        )
        return block

    def _token(self, token: Token) -> Piece:
        if token.logprobs and not (token.token_ids or token.text) and self._has_token_ids:  # of no sampled token
            return PromptScored(token.logprobs)
        choice = self._choice(token.choice)
        block = choice.blocks.get(token.index) or self._block(token.choice, token.index)
        num_tokens = len(token.token_ids) if self._has_token_ids else bool(token.text)
        self._num_completion += num_tokens
        if block.kind == TEXT:
            choice.num_chars += len(token.text)
        elif block.kind == THINKING:
            self._num_reasoning += num_tokens
        return Delta(block, token)

    def _places(self, citation: Citation) -> Mapping[int, tuple[int, int]]:
        numbers = tuple(self._choices) if citation.choice is None else (citation.choice,)
        return {number: self._place(self._choice(number), citation) for number in numbers}

    def _place(self, choice: _Choice, citation: Citation) -> tuple[int, int]:
        index = citation.index or 0
        block = choice.blocks.get(index)
        begin = block.begin if block is not None else None if index else 0
        if citation.start is None or citation.end is None or begin is None:
            return choice.num_chars, choice.num_chars
        return begin + citation.start, begin + citation.end

    def _end_choice(self, ended: ChoiceEnded) -> list[Piece]:
        choice = self._choice(ended.choice)
        if choice.is_ended:
            return []
        choice.is_ended = True
        return [ended]

    def _end(self, done: Done) -> list[Piece]:
        if done.finish_reason not in SUCCESS_REASONS:
            return [Failed(done.finish_reason, _FAILED_MESSAGES.get(done.finish_reason, "The stream ended early."))]
        pieces: list[Piece] = []
        for number in range(self._num_asked):
            pieces += self._end_choice(ChoiceEnded(number, done.finish_reason, done.stop_string))
        return [*pieces, Succeeded(done)]


@dataclass(slots=True)
class AnswerBlock:
    """A block of an answer so far. `logprobs` is None where no token of the block has any."""

    block: Block
    num_deltas: int = 0
    logprobs: list[PositionLogprobs] | None = None
    signature: str | None = None
    is_ended: bool = False
    _text: StringIO = field(default_factory=StringIO)

    @property
    def kind(self) -> str:
        """What the block is of."""
        return self.block.kind

    @property
    def text(self) -> str:
        """The text so far: of a call, its arguments."""
        return self._text.getvalue()

    def add(self, token: Token) -> None:
        """Add what a token holds."""
        self.num_deltas += 1
        self._text.write(token.text)
        if token.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs += token.logprobs

    def as_text(self) -> BlockText:
        """Return the block as a snapshot has it, open where it has not ended."""
        block = self.block
        return BlockText(
            index=block.index,
            kind=block.kind,
            text=self.text,
            id=block.id,
            name=block.name,
            signature=self.signature,
            is_open=not self.is_ended,
        )


@dataclass(slots=True)
class AnswerChoice:
    """A choice of an answer so far: its blocks, and between them what is cited, in the order in which both came."""

    number: int
    parts: list[AnswerBlock | Cited] = field(default_factory=list)
    token_ids: array[int] = field(default_factory=partial(array, "Q"))  # of all blocks
    ended: ChoiceEnded | None = None
    _blocks: dict[int, AnswerBlock] = field(default_factory=dict)

    @property
    def blocks(self) -> Iterator[AnswerBlock]:
        """The blocks, in order."""
        return iter(self._blocks.values())

    @property
    def text(self) -> str:
        """The text of the text blocks."""
        return "".join(block.text for block in self.blocks if block.kind == TEXT)

    @property
    def finish_reason(self) -> str | None:
        """Why it ended; None while it has not."""
        return None if self.ended is None else self.ended.finish_reason

    def block(self, block: Block) -> AnswerBlock:
        """Return the block, which this adds if it is new."""
        found = self._blocks.get(block.index)
        if found is None:
            self._end_block()
            found = self._blocks[block.index] = AnswerBlock(block)
            self.parts.append(found)
        return found

    def kind_of(self, index: int) -> str:
        """Return what a block is of; a block that has not begun is of text."""
        return self._blocks[index].kind if index in self._blocks else TEXT

    def end(self, ended: ChoiceEnded) -> None:
        """Note that the choice is whole."""
        self.ended = ended
        self._end_block()

    def _end_block(self) -> None:
        """End the newest block: the implied block of a plain choice has no end of its own."""
        if self._blocks:
            next(reversed(self._blocks.values())).is_ended = True

    def block_texts(self) -> tuple[BlockText, ...]:
        """Return the blocks as a snapshot has them, the implied text block of a plain choice too."""
        return tuple(block.as_text() for block in self.blocks)

    def as_text(self) -> ChoiceText:
        """Return the choice as a snapshot has it."""
        is_plain = all(block.block.is_implied for block in self.blocks)
        return ChoiceText(
            text=self.text,
            finish_reason=self.finish_reason,
            blocks=() if is_plain else self.block_texts(),
            stop_string=None if self.ended is None else self.ended.stop_string,
        )


class Answer:
    """An answer so far, or the whole of it. It is fed the events of one log from seq 1, in order.

    `steps` are the statuses of a run's outline, `approvals` what its user is asked, `prompt` the prompt's
    log-probabilities. `state` is a run's, None without a state; `customs` are its own events. `end` is None before the
    end.
    """

    def __init__(self, n: int = 1) -> None:
        self.choices = [AnswerChoice(number) for number in range(n)]
        self.citations: list[Citation] = []
        self.steps: list[Status] = []
        self.approvals: list[Approval] = []
        self.prompt: list[PositionLogprobs] = []
        self.state: Any = None
        self.customs: list[Custom] = []
        self.end: Succeeded | Failed | None = None
        self._fold = Fold(n)

    @classmethod
    def of(cls, log: Iterable[LoggedEvent], n: int = 1) -> Answer:
        """Return the answer of a log, or of its beginning, with `n` choices or as many as the log has."""
        events = [logged.event for logged in log]
        met = max((event.choice for event in events if isinstance(event, Token | ChoiceDone)), default=0)
        answer = cls(max(n, met + 1))
        for event in events:
            answer.feed(event)
        return answer

    @property
    def done(self) -> Done:
        """The `Done` of a successful answer. Raises the error that the answer ended in."""
        if isinstance(self.end, Failed):
            raise self.end.error()
        assert self.end is not None, "the log has no terminal event"
        return self.end.done

    @property
    def usage(self) -> Usage:
        """The counts of what it was fed."""
        return self._fold.usage

    def feed(self, event: Event) -> None:
        """Add an event."""
        for piece in self._fold.feed(event):
            self._add(piece)

    def _add(self, piece: Piece) -> None:
        if isinstance(piece, Delta):
            choice = self.choice(piece.block.choice)
            choice.token_ids.extend(piece.token.token_ids)
            choice.block(piece.block).add(piece.token)
        elif isinstance(piece, BlockBegun):
            self.choice(piece.block.choice).block(piece.block)
        elif isinstance(piece, BlockEnded):
            block = self.choice(piece.block.choice).block(piece.block)
            block.signature, block.is_ended = piece.signature, True
        elif isinstance(piece, Cited):
            self.citations.append(piece.citation)
            for number in piece.places:
                self.choice(number).parts.append(piece)
        elif isinstance(piece, Status):
            if is_outline(piece):
                self.steps.append(piece)
        elif isinstance(piece, Approval):
            self.approvals.append(piece)
        elif isinstance(piece, State):
            self.state = state_after(self.state, piece)
        elif isinstance(piece, Custom):
            self.customs.append(piece)
        elif isinstance(piece, PromptScored):
            self.prompt += piece.positions
        elif isinstance(piece, ChoiceEnded):
            self.choice(piece.choice).end(piece)
        elif not isinstance(piece, Meta):
            self.end = piece

    def snapshot(self, seq: int) -> Snapshot:
        """Return the answer as a snapshot as of event `seq`."""
        return Snapshot(
            seq=seq,
            choices=tuple(choice.as_text() for choice in self.choices),
            citations=tuple(self.citations),
            state=None if self.state is None else json_text(self.state),
            approvals=tuple(self.approvals),
            customs=tuple(self.customs),
        )

    def choice(self, number: int) -> AnswerChoice:
        """Return a choice, which this adds if it is new."""
        while len(self.choices) <= number:
            self.choices.append(AnswerChoice(len(self.choices)))
        return self.choices[number]


def is_outline(event: Event) -> bool:
    """Return whether an event is of a run's outline: a step, what was left out, a citation, or what is asked."""
    return isinstance(event, Citation | Approval) or (isinstance(event, Status) and event.status in (STEP, TRIMMED))


def state_after(state: Any, event: State) -> Any:
    """Return the state of a run after an event."""
    if event.snapshot is not None:
        return json.loads(event.snapshot)
    return patched(state, json.loads(event.delta or "[]"))
