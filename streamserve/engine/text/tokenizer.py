"""Text to ids, and ids to text: the `Tokenizer` protocol, and `Detokenizer`, which takes a token at a time.

`PublicPrefixes` finds what of a prompt is the server's own.

A tokenizer knows chat templates and vocabularies; no engine and no events. Called from tokenising threads (`encode`)
and the event loop (`token_bytes`), so it is read-only after loading.

A detokenizer shows whole code points only, and nothing that may still become a stop string. What is held back is a
pure function of the ids seen, so that a detokenizer fed the same ids is in the same state. Bounded time and memory per
token, whatever the bytes. Why not `tokenizers.DecodeStream`: it has no flush, is quadratic on bytes that never become
valid, and raises on some SentencePiece streams (research/engine.md 0.8).
"""

from __future__ import annotations

import codecs
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, Protocol

from streamserve.protocol.errors import BadRequest, PromptTooLong, StreamserveError
from streamserve.protocol.requests import GenerateRequest, Message

logger = logging.getLogger(__name__)

# Above what any model here takes (a megabyte is some 250,000 tokens); keeps tokenising itself bounded.
MAX_PROMPT_BYTES = 2 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """An encoded prompt. The first `num_public_tokens` are the server's own, the same for all tenants."""

    token_ids: tuple[int, ...]
    num_public_tokens: int = 0


class Tokenizer(Protocol):
    """What the engine's text side needs of a tokenizer.

    `is_byte_exact`: the text is `token_bytes` joined; otherwise the detokenizer compares `decode`s.
    `strips_leading_space` is SentencePiece's habit: the first token of an answer starts with a space that is no text.
    """

    vocab_size: int
    eos_token_ids: frozenset[int]
    has_chat_template: bool
    is_byte_exact: bool
    strips_leading_space: bool

    def encode(self, request: GenerateRequest) -> Prompt:
        """Render and tokenise; raises BadRequest (NoChatTemplate, PromptTooLong). Slow: never on the loop."""

    def text_ids(self, text: str) -> tuple[int, ...]:
        """Return the ids of a piece of text, without those that begin or end a prompt."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes a token stands for; b"" for ids without any."""

    def is_special(self, token_id: int) -> bool:
        """Return whether a token is left out of the text."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, specials left out."""


def checked_bytes(text: str, param: str = "prompt") -> bytes:
    """Return the UTF-8 of a prompt, or of another field, or refuse what is not text or too large to tokenise."""
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(f"the {param} holds half of a surrogate pair. Send valid Unicode.", param=param) from error
    if len(data) > MAX_PROMPT_BYTES:
        raise PromptTooLong(f"{param} has {len(data):,} bytes; at most {MAX_PROMPT_BYTES:,} are tokenised. Shorten it.")
    return data


def checked_ids(token_ids: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    """Return the ids, or refuse an empty prompt and ids this model does not have."""
    if not token_ids:
        raise BadRequest("the prompt is empty. Send at least one token.", param="prompt")
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        raise BadRequest(f"token ids of this model are 0 to {vocab_size - 1:,}.", param="prompt_token_ids")
    return token_ids


# Variables that a client may set whether the template reads them or not: clients set variables of several models at
# once.
TEMPLATE_KWARGS = frozenset(
    {
        "enable_thinking",  # Qwen3, SmolLM3, …
        "thinking",  # Granite, DeepSeek-V3.1
        "thinking_budget",  # Seed-OSS
        "reasoning_effort",  # gpt-oss
        "add_generation_prompt",
        "continue_final_message",
    }
)


def checked_kwargs(request: GenerateRequest, variables: frozenset[str]) -> dict[str, Any]:
    """Return the variables that the caller sets, or refuse those that the chat template does not read."""
    unknown = sorted(set(request.chat_template_kwargs) - variables - TEMPLATE_KWARGS)
    if unknown:
        reads = f"It reads {', '.join(sorted(variables))}." if variables else "It reads none."
        raise BadRequest(
            f"chat_template_kwargs: this model's chat template does not read {', '.join(unknown)[:200]}. {reads}",
            param="chat_template_kwargs",
        )
    return dict(request.chat_template_kwargs)


# Longest run of tokens a window decoder waits for before it shows replacement characters.
_MAX_PENDING_TOKENS = 16


class Detokenizer(Protocol):
    """Turns ids into text."""

    def feed(self, token_id: int) -> str:
        """Return the text that is certain now."""

    def flush(self) -> str:
        """Return what is left at the end. Half a code point is no text: it is dropped."""


def make_detokenizer(tokenizer: Tokenizer, *, strip_leading_space: bool) -> Detokenizer:
    """Return the exact detokenizer if the tokenizer's bytes are the text, else a detokenizer that compares."""
    if tokenizer.is_byte_exact:
        return ByteDetokenizer(tokenizer, strip_leading_space=strip_leading_space)
    return WindowDetokenizer(tokenizer)


class ByteDetokenizer:
    """Bytes through an incremental UTF-8 decoder, which holds back at most three of them."""

    def __init__(self, tokenizer: Tokenizer, *, strip_leading_space: bool = False) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = strip_leading_space and tokenizer.strips_leading_space

    def feed(self, token_id: int) -> str:
        """Return the text that is certain now."""
        if self._tokenizer.is_special(token_id):
            return ""
        data = self._tokenizer.token_bytes(token_id)
        if self._strip and data:
            data, self._strip = data.removeprefix(b" "), False
        return self._decoder.decode(data)

    def flush(self) -> str:
        """Drop what is left: the beginning of a code point at most."""
        self._decoder.reset()
        return ""


class WindowDetokenizer:
    """For decoders that are not a map from ids to bytes: decode a short window twice and show the difference.

        ids:  ...... [ context ........ | pending .... ]
                     decode(context), decode(context + pending): the second begins with the first

    (Idea: TGI's two offsets; here the pending part is bounded, and flushed at the end.)
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._pending: list[int] = []

    def feed(self, token_id: int) -> str:
        """Return the text that is certain now."""
        if self._tokenizer.is_special(token_id):
            return ""
        self._pending.append(token_id)
        text = self._new_text()
        if text.endswith("\ufffd") and len(self._pending) < _MAX_PENDING_TOKENS:
            return ""
        self._context, self._pending = self._pending, []
        return text

    def flush(self) -> str:
        """Return what is left at the end, up to what decodes to U+FFFD: that may be half a code point."""
        text, self._pending = self._new_text(), []
        return text.rstrip("\ufffd")

    def _new_text(self) -> str:
        shown = self._tokenizer.decode(self._context)
        return self._tokenizer.decode([*self._context, *self._pending])[len(shown) :]


class StopStrings:
    """Watches text for stop strings; the stop string that is complete first ends it, and is no part of it unless
    `is_kept`.

    Holds back only the longest suffix that may still become a stop string. Among those complete at the same character
    the longest wins, so that as little of any as possible is shown. `found` is the string that has ended the text.
    """

    def __init__(self, stop: Iterable[str], *, is_kept: bool = False) -> None:
        self._stop = tuple(stop)
        self._is_kept = is_kept
        self._held = ""
        self.found: str | None = None

    @property
    def is_found(self) -> bool:
        """Whether a stop string has ended the text."""
        return self.found is not None

    def feed(self, text: str) -> str:
        """Return the text that can be shown now; look at `is_found` afterwards."""
        self._held += text
        place = self._earliest()
        if place is not None:
            start, end = place
            self.found = self._held[start:end]
            return self._take(end if self._is_kept else start)
        return self._take(len(self._held) - self._num_undecided())

    def feed_unchecked(self, text: str) -> str:
        """Return everything: before min_tokens no stop string counts."""
        self._held += text
        return self._take(len(self._held))

    def flush(self) -> str:
        """Return what is held back, at the end."""
        return self._take(len(self._held))

    def _earliest(self) -> tuple[int, int] | None:
        """Return where the stop string that is complete first begins and ends."""
        starts = ((self._held.find(stop), stop) for stop in self._stop)
        found = [(start + len(stop), start) for start, stop in starts if start >= 0]
        if not found:
            return None
        end, start = min(found)
        return start, end

    def _num_undecided(self) -> int:
        """Return the length of the longest suffix of what is held that is the beginning of a stop string."""
        longest = max(map(len, self._stop), default=0) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop):
                return length
        return 0

    def _take(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        if self.is_found:
            self._held = ""
        return text


# Two turns that begin differently, so that what their renderings have in common holds no part of a turn.
_PROBES = ("a", "0")
# Prefixes known at once: a site has a prefix for each model and a few for its pipelines, and new prefixes after its
# settings or its code were changed.
_MOST_KNOWN = 64


class PublicPrefixes:
    """How many tokens of a prompt are the server's own, so that all tenants may share their blocks. Of one tokenizer.

    That is the number of tokens before the caller's first token: what a rendering of the server's own messages
    (`public_messages`: its system prompt, or a pipeline's messages in every run) has in common with this prompt,
    whatever stands after them. A system prompt that the caller sent is the caller's, even if it is the same: an answer
    to it must not show by its speed that another caller uses it. (Source: vllm PR#37961, a salt on everything ends the
    sharing of the common system prompt; arXiv 2411.18191, CVE-2025-46570, what a shared cache shows of other callers.)

    On tokenising threads; two that meet the same prompt for the first time both render it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[tuple[tuple[str, str], ...], tuple[int, ...]] = {}

    def num_tokens(self, request: GenerateRequest, token_ids: tuple[int, ...]) -> int:
        """Return how many of the prompt's tokens come before anything of the caller's; 0 where nothing was inserted."""
        if not request.public_messages:
            return 0
        key = tuple((message.role, message.content) for message in request.public_messages)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._render(request)
        num_common = _num_common(known, token_ids)
        # Some templates write the date: render again. A caller's first character may join our last token: that is 1.
        is_plain = not request.chat_template_kwargs and not request.tools
        has_turn = request.messages != request.public_messages
        if num_common < len(known) - 1 and is_plain and has_turn:
            known = self._known[key] = self._render(request)
            num_common = _num_common(known, token_ids)
        while len(self._known) > _MOST_KNOWN:
            self._known.pop(next(iter(self._known)), None)
        return num_common

    def _render(self, request: GenerateRequest) -> tuple[int, ...]:
        """Render the public messages before two different turns, with nothing that the caller may set."""
        public = request.public_messages
        role = "assistant" if public[-1].role == "user" else "user"
        try:
            one, other = (
                self._tokenizer.encode(
                    replace(
                        request,
                        messages=(*public, Message(role=role, content=turn)),
                        chat_template_kwargs={},
                        tools=(),
                        continue_final_message=False,
                    )
                ).token_ids
                for turn in _PROBES
            )
        except StreamserveError:  # a template may refuse what it gets here: then nothing is shared
            logger.warning("the server's own text cannot be rendered alone; its blocks are not shared", exc_info=True)
            return ()
        return one[: _num_common(one, other)]


def _num_common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    pairs: Iterable[tuple[int, int]] = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
