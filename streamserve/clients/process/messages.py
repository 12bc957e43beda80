"""The messages between a client and an engine process: typed values, one message in a frame.

    client                                   engine
    Hello  ─────────────────────────────────►          protocol, config hash, age of the settings
           ◄───────────────────────────────── Welcome  the same of the engine, pid, start time
    Open, Warm, Tokenize, Control  ─────────►          answered by Opened, Reply or Refusal of the same id
    Spelling, Embed  ───────────────────────►          answered by Spelt, Vectors or Refusal
    ReaderAt, Cancel  ──────────────────────►          not answered
           ◄───────────────────────────────── News     events of generations: one frame a loop turn
           ◄───────────────────────────────── State    once a second at least: the heartbeat
           ◄───────────────────────────────── Goodbye  the engine ends in good order

Hello and Welcome are maps, which every version of the protocol can read. PROTOCOL grows when another message changes.
Flow control is the reader's position: the engine decodes no more than `lead_tokens` beyond it. Pure: no I/O.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from streamserve.protocol.embeddings import Embedded, EmbedRequest
from streamserve.protocol.engine import Accepted, EngineStats, ModelDescription, Park
from streamserve.protocol.errors import Refused, StreamserveError
from streamserve.protocol.frames import MSGPACK_ERRORS, FrameError, unpack
from streamserve.protocol.requests import Admission, GenerateRequest, Resume
from streamserve.protocol.spelling import Spell, Spelled

PROTOCOL = 3


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """The client's first frame. `made_at`: when its settings were read, on the machine's monotonic clock."""

    protocol: int
    config_hash: str
    made_at: float


class Welcome(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's first frame. `made_at`: the age of the config that it was started with."""

    protocol: int
    config_hash: str
    made_at: float
    pid: int
    started_at: float


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """On the wire: [class name, field, field, ...]."""


class Open(Message, frozen=True):
    """Begin or continue generation `id`."""

    id: int
    request: GenerateRequest
    admission: Admission
    resume: Resume


class Warm(Message, frozen=True):
    """Prefill the prompt."""

    id: int
    request: GenerateRequest
    admission: Admission


class Tokenize(Message, frozen=True):
    """Return the prompt's token ids."""

    id: int
    request: GenerateRequest
    admission: Admission


class Spelling(Message, frozen=True):
    """Return ids of a bare text, or texts of ids."""

    id: int
    asked: Spell


class Embed(Message, frozen=True):
    """Return the vectors of the inputs."""

    id: int
    request: EmbedRequest
    admission: Admission


class Control(Message, frozen=True):
    """Carry out an operator's action: an action of EngineClient.control, or "stop": drain, then end."""

    id: int
    action: str


class ReaderAt(Message, frozen=True):
    """The furthest reader of generation `id` has received `num_tokens` of each choice; `is_away`: it does not look.

    The last field may be missing, and who does not know it ignores it.
    """

    id: int
    num_tokens: tuple[int, ...] | None
    is_away: bool = False


class Cancel(Message, frozen=True):
    """End request `id`, answered or not."""

    id: int


class Opened(Message, frozen=True):
    """Generation `id` is accepted."""

    id: int
    accepted: Accepted


class Reply(Message, frozen=True):
    """Request `id` is done."""

    id: int
    token_ids: tuple[int, ...] = ()


class Vectors(Message, frozen=True):
    """The vectors that `Embed` of this id has asked for."""

    id: int
    embedded: Embedded


class Spelt(Message, frozen=True):
    """The answer to `Spelling` of this id."""

    id: int
    spelled: Spelled


class Refusal(Message, frozen=True):
    """Request `id` is refused; `kind` is the error's class."""

    id: int
    kind: str
    message: str
    code: str
    param: str | None
    retry_after: int


class GenerationNews(msgspec.Struct, frozen=True, array_like=True):
    """New events of one generation, each as `frames.encode_event` gives it; `is_end`: nothing follows."""

    id: int
    events: tuple[bytes, ...]
    num_cached_tokens: int
    is_end: bool
    park: Park | None


class News(Message, frozen=True):
    """New events of this client's generations, from one turn of the engine's loop.

    `sent_at`: on the machine's monotonic clock. It may be missing, and who does not know it ignores it.
    """

    generations: tuple[GenerationNews, ...]
    sent_at: float | None = None


class State(Message, frozen=True):
    """The engine's state and counts."""

    description: ModelDescription
    stats: EngineStats


class Goodbye(Message, frozen=True):
    """The engine ends in good order: "idle", "asleep", "stopped", or "replaced" by an engine of another config."""

    reason: str


ToEngine = Open | Warm | Tokenize | Spelling | Embed | Control | ReaderAt | Cancel
ToClient = Opened | Reply | Spelt | Vectors | Refusal | News | State | Goodbye


def _plain(value: Any) -> float:
    """Return a number of a class of its own, such as `Arrival`, as a number."""
    if isinstance(value, float):
        return float(value)
    raise TypeError(f"{type(value).__name__} has no place in MessagePack")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
_HELLO: msgspec.msgpack.Decoder[Hello] = msgspec.msgpack.Decoder(Hello)
_WELCOME: msgspec.msgpack.Decoder[Welcome] = msgspec.msgpack.Decoder(Welcome)
# The later frames; both raise MSGPACK_ERRORS.
TO_ENGINE: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
TO_CLIENT: msgspec.msgpack.Decoder[ToClient] = msgspec.msgpack.Decoder(ToClient)


def encode(message: Hello | Welcome | ToEngine | ToClient) -> bytes:
    """Return a frame's payload; raises FrameError for a value without a place in MessagePack."""
    try:
        return _ENCODER.encode(message)
    except MSGPACK_ERRORS as error:
        raise FrameError(f"not to be encoded: {error}") from error


def decode_hello(payload: bytes) -> Hello:
    """Read a client's first frame; raises FrameError."""
    return unpack(_HELLO, payload)


def decode_welcome(payload: bytes) -> Welcome:
    """Read an engine's first frame; raises FrameError."""
    return unpack(_WELCOME, payload)


def is_replaced(welcome: Welcome, hello: Hello) -> bool:
    """Return whether the engine ends in favour of the client's config. Both sides compute this, and agree.

    The most recent settings win, whichever client started the engine; clients with older settings use that engine too.
    """
    return welcome.config_hash != hello.config_hash and hello.made_at > welcome.made_at


def refusal(request_id: int, error: StreamserveError) -> Refusal:
    """Return an error as a message."""
    retry_after = error.retry_after if isinstance(error, Refused) else 0
    return Refusal(request_id, type(error).__name__, error.message, error.code, error.param, retry_after)


def error_of(message: Refusal) -> StreamserveError:
    """Return the refused request's error; for a class unknown here, the root of the error tree."""
    kind = _KINDS.get(message.kind, StreamserveError)
    if issubclass(kind, Refused):
        return kind(message.message, code=message.code, param=message.param, retry_after=message.retry_after)
    return kind(message.message, code=message.code, param=message.param)


def _tree(root: type[StreamserveError]) -> Iterator[type[StreamserveError]]:
    yield root
    for kind in root.__subclasses__():
        yield from _tree(kind)


_KINDS = {kind.__name__: kind for kind in _tree(StreamserveError)}
