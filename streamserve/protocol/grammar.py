"""The order of a stream's events: one state machine that is fed each event and names the law that it breaks.

    meta (status | citation | state | custom | block_start | token | block_stop | approval | choice_done)*
         (done | error)

A stream has one state, and each choice another. In a choice one block is open at a time:

    FRESH ─ token 0 ───────► IMPLIED ────────────────────── choice_done ─► DONE
      │                         │ block_start 1                             ▲
      └──── block_start 0 ──► BLOCK ─ block_stop ─► BETWEEN ─ choice_done ──┘
                                ▲                      │
                                └── block_start n + 1 ─┘

IMPLIED is text block 0 of a choice without a `block_start`. It has no `block_stop` either, and a block may follow it. A
choice that a reader meets in the middle begins in UNSEEN; RESUMED is its block 0, which may be implied or not. Unknown
events may stand wherever a status may.

Modelled on h11's `_state.py`: the tables are the law; the code looks them up, and checks what a table cannot hold,
indexes and counts. Pure. Engines and readers do not call this; the tests do, on every stream that they read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum, auto

from streamserve.protocol.events import (
    INTERRUPT,
    Approval,
    BlockStart,
    BlockStop,
    ChoiceDone,
    ChoiceText,
    Citation,
    Custom,
    Done,
    Error,
    Event,
    Meta,
    Snapshot,
    State,
    Status,
    Token,
    Unknown,
    is_success,
)


class Law(StrEnum):
    """What a sequence of events can break. The value is the law as a sentence."""

    META_FIRST = "meta is the first event, and stands once"
    ONE_TERMINAL = "nothing follows done or error"
    HAS_TERMINAL = "done or error is the last event"
    TOKEN_IN_OPEN_BLOCK = "a token names the open block, or the implied text block 0"
    ONE_OPEN_BLOCK = "a block is closed before its choice opens the next block"
    BLOCKS_IN_ORDER = "a choice numbers its blocks from 0, without a gap"
    STOP_OF_OPEN_BLOCK = "a block_stop names the open block"
    BLOCKS_CLOSED = "no block is open when its choice, or the answer, succeeds"
    CHOICE_DONE_ONCE = "a choice is done once, and no event of it follows"
    ALL_CHOICES_DONE = "where one choice is done before a successful done, all are"
    CITATION_OF_KNOWN_BLOCK = "a citation names no block, or a block of its choice that has begun"
    APPROVAL_OF_WHOLE_CALL = "an approval names a call of the run whose block has stopped, and no call twice"
    INTERRUPT_ASKS = "a run that ends in interrupt asks for approval, and no other success does"
    STATE_BEGINS_WHOLE = "a state is a snapshot or a patch, and the first is a snapshot"
    EACH_ID_ONCE = "the ids of all tokens are as many as usage counts, or meta states that there are none"


class GrammarError(ValueError):
    """An event that breaks `law`."""

    def __init__(self, law: Law, detail: str) -> None:
        super().__init__(f"{law.value}: {detail}")
        self.law = law


class StreamState(StrEnum):
    """Where a stream is."""

    START = auto()
    RUNNING = auto()
    ENDED = auto()


class ChoiceState(StrEnum):
    """Where one choice of a stream is."""

    FRESH = auto()
    IMPLIED = auto()
    BLOCK = auto()
    BETWEEN = auto()
    DONE = auto()
    UNSEEN = auto()
    RESUMED = auto()


_CONTENT = (Status, Citation, State, Custom, BlockStart, Token, BlockStop, Approval, ChoiceDone, Snapshot, Unknown)

_STREAM: Mapping[StreamState, Mapping[type[Event], StreamState]] = {
    StreamState.START: {Meta: StreamState.RUNNING},
    StreamState.RUNNING: {
        **dict.fromkeys(_CONTENT, StreamState.RUNNING),
        **dict.fromkeys((Done, Error), StreamState.ENDED),
    },
    StreamState.ENDED: {},
}

_CHOICE: Mapping[ChoiceState, Mapping[type[Event], ChoiceState]] = {
    ChoiceState.FRESH: {
        Citation: ChoiceState.FRESH,
        Token: ChoiceState.IMPLIED,
        BlockStart: ChoiceState.BLOCK,
        ChoiceDone: ChoiceState.DONE,
    },
    ChoiceState.IMPLIED: {
        Citation: ChoiceState.IMPLIED,
        Token: ChoiceState.IMPLIED,
        BlockStart: ChoiceState.BLOCK,
        ChoiceDone: ChoiceState.DONE,
    },
    ChoiceState.BLOCK: {
        Citation: ChoiceState.BLOCK,
        Token: ChoiceState.BLOCK,
        BlockStop: ChoiceState.BETWEEN,
    },
    ChoiceState.BETWEEN: {
        Citation: ChoiceState.BETWEEN,
        BlockStart: ChoiceState.BLOCK,
        ChoiceDone: ChoiceState.DONE,
    },
    ChoiceState.DONE: {},
    ChoiceState.UNSEEN: {
        Citation: ChoiceState.UNSEEN,
        Token: ChoiceState.RESUMED,
        BlockStart: ChoiceState.BLOCK,
        BlockStop: ChoiceState.BETWEEN,
        ChoiceDone: ChoiceState.DONE,
    },
    ChoiceState.RESUMED: {  # block 0, implied or begun before the reader came
        Citation: ChoiceState.RESUMED,
        Token: ChoiceState.RESUMED,
        BlockStart: ChoiceState.BLOCK,
        BlockStop: ChoiceState.BETWEEN,
        ChoiceDone: ChoiceState.DONE,
    },
}

# Which law an event breaks that its row in `_CHOICE` lacks; in DONE it is always CHOICE_DONE_ONCE.
_BROKEN: Mapping[type[Event], Law] = {
    BlockStart: Law.ONE_OPEN_BLOCK,
    Token: Law.TOKEN_IN_OPEN_BLOCK,
    BlockStop: Law.STOP_OF_OPEN_BLOCK,
    ChoiceDone: Law.BLOCKS_CLOSED,
}


class _Choice:
    """One choice: its state, and the index of its newest block, None while it has none that is known."""

    def __init__(self, state: ChoiceState) -> None:
        self.state = state
        self.index: int | None = None

    def feed(self, event: Token | BlockStart | BlockStop | Citation | ChoiceDone) -> None:
        """Take the event's transition, or raise."""
        before = self.state
        after = _CHOICE[before].get(type(event))
        if after is None:
            law = Law.CHOICE_DONE_ONCE if before is ChoiceState.DONE else _BROKEN[type(event)]
            raise GrammarError(law, f"{event} in a choice that is {before}")
        if not isinstance(event, ChoiceDone):
            self._check_index(event)
        self.state = after
        if isinstance(event, Token) and before is ChoiceState.UNSEEN and event.index > 0:
            self.state = ChoiceState.BLOCK  # only block 0 can be implied

    def _check_index(self, event: Token | BlockStart | BlockStop | Citation) -> None:
        """Check that the event names the block that its state allows, and note the newest."""
        index, is_unseen = self.index, self.state is ChoiceState.UNSEEN
        if isinstance(event, Citation):
            if event.index is not None and not is_unseen and not 0 <= event.index <= (-1 if index is None else index):
                raise GrammarError(Law.CITATION_OF_KNOWN_BLOCK, f"{event} after block {index}")
            return
        if isinstance(event, BlockStart):
            if not is_unseen and event.index != (0 if index is None else index + 1):
                raise GrammarError(Law.BLOCKS_IN_ORDER, f"{event} after block {index}")
        elif not is_unseen and event.index != (index or 0):
            law = Law.TOKEN_IN_OPEN_BLOCK if isinstance(event, Token) else Law.STOP_OF_OPEN_BLOCK
            raise GrammarError(law, f"{event} while block {index} is open")
        self.index = event.index

    def restore(self, choice: ChoiceText) -> None:
        """Take the state that a snapshot gives."""
        if choice.blocks:
            self.index = choice.blocks[-1].index
            self.state = ChoiceState.BLOCK if choice.blocks[-1].is_open else ChoiceState.BETWEEN
        elif choice.text:
            self.index, self.state = 0, ChoiceState.IMPLIED
        if choice.finish_reason is not None:
            self.state = ChoiceState.DONE


class Grammar:
    """The machine of one stream: `feed` it every event in order, then `end` it. Both raise GrammarError.

    `is_part`: it begins in the middle, as after a resume; what came before is taken to be right.
    """

    def __init__(self, *, is_part: bool = False) -> None:
        self.state = StreamState.RUNNING if is_part else StreamState.START
        self._fresh = ChoiceState.UNSEEN if is_part else ChoiceState.FRESH
        self._choices: dict[int, _Choice] = {}
        self._num_ids: int | None = None if is_part else 0  # None: not all were seen
        self._has_ids = True
        self._is_whole = not is_part
        self._call: str | None = None  # the call that a run answers itself, while its block is open
        self._calls: set[str] = set()  # of whole blocks
        self._asked: set[str] = set()
        self._has_state = is_part

    def feed(self, event: Event) -> None:
        """Take the event's transition in the stream, and in its choice."""
        after = _STREAM[self.state].get(type(event))
        if after is None:
            law = Law.ONE_TERMINAL if self.state is StreamState.ENDED else Law.META_FIRST
            raise GrammarError(law, f"{event} in a stream that is {self.state}")
        self.state = after
        if isinstance(event, Token | BlockStart | BlockStop | ChoiceDone):
            self._choice(event.choice).feed(event)
            if isinstance(event, Token):
                self._count_ids(event)
            else:
                self._note_call(event)
        elif isinstance(event, Approval):
            self._check_approval(event)
        elif isinstance(event, Meta):
            self._has_ids = event.has_token_ids
        elif isinstance(event, Citation) and event.choice is not None:
            self._choice(event.choice).feed(event)
        elif isinstance(event, State):
            self._check_state(event)
        elif isinstance(event, Snapshot):
            self._num_ids, self._is_whole = None, False
            self._asked |= {approval.id for approval in event.approvals}
            self._has_state = self._has_state or event.state is not None
            for number, choice in enumerate(event.choices):
                self._choice(number).restore(choice)
        elif isinstance(event, Done):
            self._check_done(event)

    def _check_state(self, state: State) -> None:
        if (state.snapshot is None) == (state.delta is None) or (state.snapshot is None and not self._has_state):
            raise GrammarError(Law.STATE_BEGINS_WHOLE, f"{state}")
        self._has_state = True

    def _count_ids(self, token: Token) -> None:
        if token.token_ids and not self._has_ids:
            raise GrammarError(Law.EACH_ID_ONCE, f"{token} in a stream without ids")
        if self._num_ids is not None:
            self._num_ids += len(token.token_ids)

    def _note_call(self, event: BlockStart | BlockStop | ChoiceDone) -> None:
        if isinstance(event, BlockStart) and event.kind == "server_tool_use":
            self._call = event.id
        elif self._call is not None:
            self._calls.add(self._call)
            self._call = None

    def _check_approval(self, event: Approval) -> None:
        if event.id in self._asked or (self._is_whole and event.id not in self._calls):
            raise GrammarError(Law.APPROVAL_OF_WHOLE_CALL, f"{event} after the calls {sorted(self._calls)}")
        self._asked.add(event.id)

    def end(self) -> None:
        """Check that the stream has ended."""
        if self.state is not StreamState.ENDED:
            raise GrammarError(Law.HAS_TERMINAL, f"the stream is {self.state}")

    def _choice(self, number: int) -> _Choice:
        return self._choices.setdefault(number, _Choice(self._fresh))

    def _check_done(self, done: Done) -> None:
        if self._has_ids and self._num_ids is not None and self._num_ids != done.usage.completion_tokens:
            raise GrammarError(Law.EACH_ID_ONCE, f"{self._num_ids} ids, {done.usage.completion_tokens} counted")
        if not is_success(done):
            return
        if bool(self._asked) != (done.finish_reason == INTERRUPT) and (self._is_whole or self._asked):
            raise GrammarError(Law.INTERRUPT_ASKS, f"{done.finish_reason} after {len(self._asked)} approvals")
        states = [choice.state for choice in self._choices.values()]
        if ChoiceState.BLOCK in states:
            raise GrammarError(Law.BLOCKS_CLOSED, "done while a block is open")
        if ChoiceState.DONE in states and set(states) - {ChoiceState.DONE, ChoiceState.UNSEEN}:
            raise GrammarError(Law.ALL_CHOICES_DONE, f"choices are {', '.join(states)}")


def check_events(events: Iterable[Event], *, is_part: bool = False) -> None:
    """Check a whole stream, or with `is_part` the end of a stream. Raises GrammarError."""
    grammar = Grammar(is_part=is_part)
    for event in events:
        grammar.feed(event)
    grammar.end()
