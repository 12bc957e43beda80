"""What a tokenizer spells: as transformers' own does, special tokens with their names."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")

from streamserve.engine.text.hf_tokenizer import HFTokenizer
from streamserve.engine.text.spelling import spell
from streamserve.protocol.errors import BadRequest
from streamserve.protocol.spelling import Spell

HELPDESK = Path(__file__).parents[3] / "project" / "demo_model" / "helpdesk"
TEXT = "How do I pause? Über 3 Wochen 🙂"


def test_it_spells_as_transformers_does() -> None:
    """The model of the demo: ids of a bare text, its text, and each token's."""
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(HELPDESK), HFTokenizer(str(HELPDESK))
    ids = tuple(theirs(TEXT, add_special_tokens=False)["input_ids"])
    assert spell(ours, Spell(text=TEXT)).token_ids == ids
    ended = (*ids, theirs.eos_token_id)
    assert spell(ours, Spell(token_ids=ended)).texts == (theirs.decode(ended),)
    apart = spell(ours, Spell(token_ids=ended, is_apart=True)).texts
    assert len(apart) == len(ended)
    assert apart[-1] == theirs.eos_token
    with pytest.raises(BadRequest) as raised:
        spell(ours, Spell(token_ids=(0, ours.vocab_size)))
    assert raised.value.param == "tokens[1]"
