"""Text to ids and ids to bytes: the `Tokenizer` protocol, and `HFTokenizer` for a model folder.

Knows chat templates and vocabularies; no engine. Called from tokenising threads (`encode`) and the event loop
(`token_bytes`), so everything here is read-only after loading.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from streamserve.protocol.errors import BadRequest, PromptTooLong
from streamserve.protocol.requests import GenerateRequest

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


def checked_bytes(text: str) -> bytes:
    """Return the prompt's UTF-8, or refuse one that is not text or too large to tokenise."""
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest("the prompt holds half of a surrogate pair. Send valid Unicode.", param="prompt") from error
    if len(data) > MAX_PROMPT_BYTES:
        raise PromptTooLong(
            f"prompt has {len(data):,} bytes; at most {MAX_PROMPT_BYTES:,} are tokenised. Shorten the prompt."
        )
    return data


def checked_ids(token_ids: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    """Return the ids, or refuse an empty prompt and ids this model does not have."""
    if not token_ids:
        raise BadRequest("the prompt is empty. Send at least one token.", param="prompt")
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        raise BadRequest(f"token ids of this model are 0 to {vocab_size - 1:,}.", param="prompt_token_ids")
    return token_ids
