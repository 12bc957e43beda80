"""Laws of `benchmarks.qoe_http`: the same work for every server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast
from urllib.parse import urlsplit

import pytest

pytest.importorskip("tokenizers", reason="needs tokenizers: pip install -r requirements.txt")
pytest.importorskip("scipy", reason="needs scipy: pip install -r benchmarks/requirements.txt")

from tokenizers import Tokenizer

from benchmarks.qoe_http.readers import Prompts, ServerFault, post
from benchmarks.qoe_http.servers import Server
from benchmarks.support.shape import HELPDESK
from streamserve.loadtest.visits import draw_visits
from streamserve.testing import DaphneServer


def test_a_prompt_has_the_tokens_of_its_visit() -> None:
    """The text of a prompt has exactly the visit's number of tokens, and another run has other words."""
    prompts, tokenizer = Prompts(HELPDESK), Tokenizer.from_file(str(HELPDESK / "tokenizer.json"))
    for visit in draw_visits(1, 1.0, 20.0):
        text = prompts.text(visit, 1)
        assert len(tokenizer.encode(text, add_special_tokens=False).ids) == visit.prompt_len
        assert prompts.text(visit, 1) == text != prompts.text(visit, 2)


@pytest.mark.django_db(transaction=True)
async def test_an_answer_is_read_as_every_server_streams_it(hard_server: DaphneServer, alice_key: str) -> None:
    """Each event with an object, of the native and of OpenAI's API; a server that is wrong is named."""
    server = cast(Server, SimpleNamespace(port=urlsplit(hard_server.url).port, key=alice_key))
    asked = {"prompt": "hi", "max_tokens": 5, "ignore_eos": True, "model": "echo"}
    native = [data async for data in post(server, "/streams", asked)]
    assert sum(len(data.get("token_ids", ())) for data in native) == 5
    body = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = [data async for data in post(server, "/v1/completions", asked | body)]
    assert chunks[-1]["usage"]["completion_tokens"] == 5
    with pytest.raises(ServerFault, match="404"):
        await anext(post(server, "/streams", asked | {"model": "nope"}))
