"""A tag that is a special token marks a block, or is text. It never disappears and merges a thought into the answer."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs the engine extra: pip install streamserve[engine]")

from streamserve.engine.text.formats.markup import choose_format
from tests.support.models.tagged import EOS, answer_of, blocks_of, events_of, ids_of, tagged_tokenizer

OUTPUT = "<think>\nTwo and two make four.\n</think>\n\n4" + EOS
TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"
)


def test_special_think_tags_mark_a_thought(tmp_path: Path) -> None:
    """The reader of this answer was shown "\\nTwo and two make four.\\n\\n\\n4"."""
    tokenizer = tagged_tokenizer(tmp_path, special=["<think>", "</think>"], template=TEMPLATE)
    events = events_of(
        answer_of(tokenizer, choose_format(tokenizer)).choice(), ids_of(tokenizer, OUTPUT), finish_reason="stop"
    )
    assert blocks_of(events) == [
        {"kind": "thinking", "text": "Two and two make four."},
        {"kind": "text", "text": "4"},
    ]


def test_tags_of_an_unknown_format_are_text(tmp_path: Path) -> None:
    """Where no format is chosen, and in an answer to a bare prompt, special tags are shown."""
    tokenizer = tagged_tokenizer(tmp_path, special=["<think>", "</think>"], template=TEMPLATE)
    ids = ids_of(tokenizer, OUTPUT)
    shown = [{"kind": "text", "text": OUTPUT.removesuffix(EOS)}]
    unknown = answer_of(tokenizer, choose_format(tokenizer, "text"))
    assert blocks_of(events_of(unknown.choice(), ids, "stop")) == shown
    bare = answer_of(tokenizer, choose_format(tokenizer), messages=None, prompt_token_ids=(1,))
    assert blocks_of(events_of(bare.choice(), ids, "stop")) == shown
