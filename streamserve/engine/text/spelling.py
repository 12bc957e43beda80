"""`spell`: ids of a bare text and texts of ids, as the model's tokenizer has them. Slow: never on an event loop."""

from __future__ import annotations

from streamserve.engine.text.tokenizer import Tokenizer, checked_bytes
from streamserve.protocol.errors import BadRequest
from streamserve.protocol.spelling import Spell, Spelled


def spell(tokenizer: Tokenizer, asked: Spell) -> Spelled:
    """Return what is asked. The text of ids has the names of special tokens. Raises BadRequest for unknown ids."""
    if asked.text is not None:
        checked_bytes(asked.text)
        return Spelled(token_ids=tokenizer.text_ids(asked.text))
    refuse_unknown_ids(asked.token_ids, tokenizer.vocab_size)
    if asked.is_apart:
        return Spelled(texts=tuple(tokenizer.token_bytes(one).decode(errors="replace") for one in asked.token_ids))
    return Spelled(texts=(_text_of(tokenizer, asked.token_ids),))


def refuse_unknown_ids(token_ids: tuple[int, ...], vocab_size: int) -> None:
    """Raise BadRequest for an id that the model does not have."""
    for index, one in enumerate(token_ids):
        if not 0 <= one < vocab_size:
            message = f"tokens[{index}] is {one}; ids of tokens of this model are 0 to {vocab_size - 1:,}."
            raise BadRequest(message, code="invalid_value", param=f"tokens[{index}]")


def _text_of(tokenizer: Tokenizer, token_ids: tuple[int, ...]) -> str:
    if not tokenizer.is_byte_exact:
        return tokenizer.decode(token_ids)
    text = b"".join(map(tokenizer.token_bytes, token_ids)).decode(errors="replace")
    return text.removeprefix(" ") if tokenizer.strips_leading_space else text
