"""The sums of `benchmarks.peers`, and its prompts."""

from __future__ import annotations

import pytest

pytest.importorskip("tokenizers", reason="needs the engine extra: pip install streamserve[engine]")
pytest.importorskip("websockets", reason="needs websockets: pip install -r tests/requirements.txt")

from benchmarks.peers import Reading, summary
from benchmarks.qoe_http.readers import Prompts
from benchmarks.support.shape import HELPDESK


def test_medians_of_the_rounds_medians() -> None:
    """A round with many slow readers counts as one round."""
    slow = [Reading(ttft=900.0, itl=90.0)] * 5
    rounds = [[Reading(10.0, 1.0), Reading(20.0, 2.0), Reading(600.0, 60.0)], [Reading(30.0, 3.0)], slow]
    assert summary(rounds) == (30.0, 3.0)


def test_prompts_are_drawn_anew_for_each_stream() -> None:
    """The same seed gives the same prompt, so that contenders are alike; another one shares no cached block with it."""
    prompts = Prompts(HELPDESK)
    one, same, other = prompts.draw(40, "0 ours 0"), prompts.draw(40, "0 ours 0"), prompts.draw(40, "0 ours 1")
    assert one == same
    assert one.split()[:8] != other.split()[:8]
