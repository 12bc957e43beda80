"""Laws of `benchmarks.qoe_http`: the same work for every server."""

from __future__ import annotations

import pytest

pytest.importorskip("tokenizers", reason="needs tokenizers: pip install -r requirements.txt")
pytest.importorskip("scipy", reason="needs scipy: pip install -r benchmarks/requirements.txt")

from tokenizers import Tokenizer

from benchmarks.qoe_http.readers import Prompts
from benchmarks.support.shape import HELPDESK
from streamserve.loadtest.visits import draw_visits


def test_a_prompt_has_the_tokens_of_its_visit() -> None:
    """The text of a prompt has exactly the visit's number of tokens, and another run has other words."""
    prompts, tokenizer = Prompts(HELPDESK), Tokenizer.from_file(str(HELPDESK / "tokenizer.json"))
    for visit in draw_visits(1, 1.0, 20.0):
        text = prompts.text(visit, 1)
        assert len(tokenizer.encode(text, add_special_tokens=False).ids) == visit.prompt_len
        assert prompts.text(visit, 1) == text != prompts.text(visit, 2)
