"""What a worker and an engine process say to each other: typed messages, one to a frame.

    worker                                   engine
    Hello  ─────────────────────────────────►          who I am: protocol, config hash
           ◄───────────────────────────────── Welcome  who I am: the same, pid, age
    Open, Warm, Tokenize, Control  ─────────►          answered by Opened, Reply or Refusal of the same id
    ReaderAt, Cancel  ──────────────────────►          not answered
           ◄───────────────────────────────── News     events of generations: one frame a loop turn
           ◄───────────────────────────────── State    once a second at least: the sign of life
           ◄───────────────────────────────── Goodbye  the engine ends in good order

Hello and Welcome are maps, which every version of the protocol can read. PROTOCOL grows when another message changes.
Credit (DESIGN 4.2) is the reader's position: the engine decodes no more than `lead_tokens` beyond it. Pure: no I/O.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from streamserve.protocol.errors import Refused, StreamserveError
from streamserve.protocol.frames import pack, unpack
from streamserve.protocol.park import Accepted, Park
from streamserve.protocol.requests import GenerateRequest
from streamserve.protocol.stats import EngineStats, ModelDescription

PROTOCOL = 1


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """The worker's first frame. `made_at`: when its settings were read, on the machine's monotonic clock."""

    protocol: int
    config_hash: str
    made_at: float


class Welcome(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's first frame. `made_at`: that of the spec it was started with."""

    protocol: int
    config_hash: str
    made_at: float
    pid: int
    started_at: float


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """On the wire: [class name, field, field, ...]."""


class Open(Message, frozen=True):
    """Begin a generation, which is called `id` from then on."""

    id: int
    request: GenerateRequest


class Warm(Message, frozen=True):
    """Prefill the prompt."""

    id: int
    request: GenerateRequest


class Tokenize(Message, frozen=True):
    """Tell the prompt's token ids."""

    id: int
    request: GenerateRequest


class Control(Message, frozen=True):
    """Do what an operator asks: EngineClient.control's actions, and "stop": drain, then end."""

    id: int
    action: str


class ReaderAt(Message, frozen=True):
    """The furthest reader of generation `id` has received `num_tokens` of each choice."""

    id: int
    num_tokens: tuple[int, ...] | None


class Cancel(Message, frozen=True):
    """End what was asked as `id`, whatever has become of it."""

    id: int


class Opened(Message, frozen=True):
    """Generation `id` is accepted."""

    id: int
    accepted: Accepted


class Reply(Message, frozen=True):
    """What was asked as `id` is done."""

    id: int
    token_ids: tuple[int, ...] = ()


class Refusal(Message, frozen=True):
    """What was asked as `id` is refused; `kind` is the error's class."""

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
    """What one turn of the engine's loop brought for this worker's generations."""

    generations: tuple[GenerationNews, ...]


class State(Message, frozen=True):
    """How the engine is."""

    description: ModelDescription
    stats: EngineStats


class Goodbye(Message, frozen=True):
    """The engine ends in good order: "idle", "stopped", or "replaced" by one of another config."""

    reason: str


ToEngine = Open | Warm | Tokenize | Control | ReaderAt | Cancel
ToWorker = Opened | Reply | Refusal | News | State | Goodbye

_ENCODER = msgspec.msgpack.Encoder()
_HELLO: msgspec.msgpack.Decoder[Hello] = msgspec.msgpack.Decoder(Hello)
_WELCOME: msgspec.msgpack.Decoder[Welcome] = msgspec.msgpack.Decoder(Welcome)
_TO_ENGINE: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_TO_WORKER: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)


def encode(message: Hello | Welcome | ToEngine | ToWorker) -> bytes:
    """Return a frame's payload; raises FrameError."""
    return pack(_ENCODER, message)


def decode_hello(payload: bytes) -> Hello:
    """Read a worker's first frame; raises FrameError, as the three below."""
    return unpack(_HELLO, payload)


def decode_welcome(payload: bytes) -> Welcome:
    """Read an engine's first frame."""
    return unpack(_WELCOME, payload)


def decode_to_engine(payload: bytes) -> ToEngine:
    """Read any later frame of a worker's."""
    return unpack(_TO_ENGINE, payload)


def decode_to_worker(payload: bytes) -> ToWorker:
    """Read any later frame of an engine's."""
    return unpack(_TO_WORKER, payload)


def is_replaced(welcome: Welcome, hello: Hello) -> bool:
    """Tell whether the engine makes way for the worker's config. Both sides ask this, and agree.

    The youngest settings win, whoever started the engine: an older worker goes on with what the younger one wants.
    """
    return welcome.config_hash != hello.config_hash and hello.made_at > welcome.made_at


def refusal(request_id: int, error: StreamserveError) -> Refusal:
    """Return an error as a message."""
    retry_after = error.retry_after if isinstance(error, Refused) else 0
    return Refusal(request_id, type(error).__name__, error.message, error.code, error.param, retry_after)


def error_of(message: Refusal) -> StreamserveError:
    """Return the error that was refused with; of a class unknown here, the tree's root."""
    kind = _KINDS.get(message.kind, StreamserveError)
    if issubclass(kind, Refused):
        return kind(message.message, code=message.code, param=message.param, retry_after=message.retry_after)
    return kind(message.message, code=message.code, param=message.param)


def _tree(root: type[StreamserveError]) -> Iterator[type[StreamserveError]]:
    yield root
    for kind in root.__subclasses__():
        yield from _tree(kind)


_KINDS = {kind.__name__: kind for kind in _tree(StreamserveError)}
