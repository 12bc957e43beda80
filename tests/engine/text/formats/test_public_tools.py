"""Tools are the caller's own: where a template puts them, the server's public prefix ends."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs the engine extra: pip install streamserve[engine]")

from streamserve.engine.text.tokenizer import PublicPrefixes
from streamserve.protocol.requests import Message, Tool, with_system
from tests.support.models.tagged import ask, tagged_tokenizer

SYSTEM = "Be kind."
# The server's system prompt, then the tools, then the turns: as Qwen's and Llama's templates have them.
TEMPLATE = (
    "{{ messages[0].content }}{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for m in messages[1:] %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize("is_known", [True, False])
def test_tools_are_not_public(tmp_path: Path, is_known: bool) -> None:
    """Neither where a request with tools is the first of its system prompt, nor after one without."""
    tokenizer = tagged_tokenizer(tmp_path, template=TEMPLATE)
    prefixes = PublicPrefixes(tokenizer)
    turns = (Message(role="user", content="?"),)
    if is_known:
        plain = with_system(ask(messages=turns, tools=()), SYSTEM)
        assert prefixes.num_tokens(plain, tokenizer.encode(plain).token_ids) == len(SYSTEM + "<|user|>")
    request = with_system(ask(messages=turns, tools=(Tool(name="secret"),)), SYSTEM)
    assert prefixes.num_tokens(request, tokenizer.encode(request).token_ids) == len(SYSTEM)


def test_a_continued_message_has_a_public_prefix(tmp_path: Path) -> None:
    """The last message of the caller is no part of it, and does not keep the prefix from being found."""
    tokenizer = tagged_tokenizer(tmp_path, template=TEMPLATE)
    turns = (Message(role="user", content="?"), Message(role="assistant", content="I am"))
    request = with_system(ask(messages=turns, tools=(), continue_final_message=True), SYSTEM)
    found = PublicPrefixes(tokenizer).num_tokens(request, tokenizer.encode(request).token_ids)
    assert found == len(SYSTEM + "<|user|>")
