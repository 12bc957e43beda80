"""The demo site's suggested questions are answered by its own model, in words."""

from __future__ import annotations

import re
from pathlib import Path

from project.demo_model.knowledge import facts_stated_in
from project.demo_model.quality import transformers_answer

HOME = Path(__file__).resolve().parents[2] / "templates" / "home.html"


def test_no_suggestion_ends_in_a_tool_call() -> None:
    """`How much is my next invoice?` did: the demo has no tool for it. English answers state one known fact."""
    found = re.search(r'suggestions="([^"]*)"', HOME.read_text())
    assert found is not None
    questions = found[1].split("|")
    assert len(questions) == 4
    ask = transformers_answer()
    answers = {question: ask([{"role": "user", "content": question}]) for question in questions}
    assert {question: text for question, text in answers.items() if "tool_call" in text or not text} == {}
    assert [question for question in questions[:3] if len(facts_stated_in(answers[question])) != 1] == []
