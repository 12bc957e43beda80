"""`HttpAgent` on a site under daphne: text, thoughts, tools, state, interrupts, errors, stops and cuts."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.docs.demo_site import end_engines
from tests.support.docs.doc_blocks import blocks_of
from tests.support.plugins.migrated import KEY, MAKE_KEY, Migrate
from tests.support.servers.cutting_relay import cutting
from tests.support.servers.node import FRONT_ENDS, run_script
from tests.support.servers.web_servers import Server, daphne, wait_until_ready

pytestmark = pytest.mark.proof

AGENT = Path(__file__).parent / "agent.mjs"
APP = "project.asgi:application"
FIND = {
    "name": "find",
    "description": "Return the weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory, migrated: Migrate, node: str) -> Iterator[dict[str, str]]:
    """The variables of the site, with a state folder of its own."""
    state = tmp_path_factory.mktemp("state")
    migrated(state, MAKE_KEY)
    yield {"DJANGO_SETTINGS_MODULE": "tests.support.sites.agents_site", "STREAMSERVE_STATE_DIR": str(state)}
    end_engines(state)


@pytest.fixture(scope="module")
def site(env: dict[str, str]) -> Iterator[Server]:
    with daphne(APP, env=env) as server:
        wait_until_ready(server.url)
        yield server


@pytest.fixture(scope="module")
def key() -> str:
    return KEY


def agent(site: str, key: str, name: str, *runs: dict[str, Any], **plan: Any) -> list[dict[str, Any]]:
    """Return what an agent's page has after each run."""
    asked = {"url": f"{site}/ag-ui/{name}", "runs": runs, **plan}
    found = run_script(AGENT, json.dumps(asked), env={"KEY": key})
    return list(found["runs"])


def last(run: dict[str, Any]) -> str:
    return str(run["messages"][-1]["content"])


def test_a_conversation_with_a_model(site: Server, key: str) -> None:
    """Text and thoughts; the second question is answered in the same conversation."""
    one, two = agent(site.url, key, "echo", {"say": "hello"}, {"say": "ponder"})
    assert last(one) == "Hi! 🎉"
    assert one["end"]["outcome"] == {"type": "success"}
    assert one["end"]["usage"][0]["outputTokens"] > 0
    assert [message["role"] for message in two["messages"]] == ["user", "assistant", "user", "reasoning", "assistant"]
    assert [message["content"] for message in two["messages"][-2:]] == ["Hm. Let me see.", "Yes."]


def test_a_model_calls_the_page_s_tools(site: Server, key: str) -> None:
    """The call waits for the page; its result is answered by the next run."""
    one, two = agent(site.url, key, "echo", {"say": "sky"}, {"result": "Weather report of Oslo: sunny"}, tools=[FIND])
    (call,) = one["messages"][-1]["toolCalls"]
    assert call["function"] == {"name": "find", "arguments": '{"city": "Oslo"}'}
    assert one["end"]["outcome"] == {"type": "success", "pendingToolCallIds": [call["id"]]}
    assert last(two) == "It is sunny."


def test_a_pipeline_shows_its_state_steps_and_tools(site: Server, key: str) -> None:
    """The page's own state is what the run's begins with."""
    (one,) = agent(site.url, key, "guide", {"say": "sky"}, state={"page": 3})
    assert one["state"] == {"page": 3, "asked": "sky", "found": [1, 2]}
    assert one["steps"] == ["Look", "Write"]
    assert dict(one["customs"])["chart"] == {"points": [1, 2]}
    assert dict(one["customs"])["streamserve.citation"]["url"] == "/help/7/"
    assert [message["role"] for message in one["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert last(one) == "It is sunny."


@pytest.mark.parametrize(("approve", "text"), [(True, "Done."), (False, "As you like.")])
def test_an_interrupt_is_answered(site: Server, key: str, approve: bool, text: str) -> None:
    """The page asks its user, and the next run goes on; a question after it is answered as any."""
    one, two, three = agent(site.url, key, "guide", {"say": "drop it"}, {"approve": approve}, {"say": "sky"})
    (interrupt,) = one["end"]["outcome"]["interrupts"]
    assert interrupt["message"] == "Cancel invoice 7?"
    assert two["end"]["outcome"] == {"type": "success"}
    assert last(two) == text
    assert "STEP_STARTED" not in two["types"]
    assert last(three) == "It is sunny."


def test_a_stop_cancels_the_run(site: Server, key: str) -> None:
    """What was shown stays; the run is finished, and no error."""
    (one,) = agent(site.url, key, "echo", {"say": "long", "stop": True, "props": {"max_tokens": 400}})
    assert one["end"]["outcome"] == {"type": "cancelled"}
    assert one["error"] is None
    assert last(one).startswith("W")


def test_failures_have_their_codes(site: Server, key: str) -> None:
    """In the middle of a run an event; before it a status, with the event as its body."""
    (one,) = agent(site.url, key, "broken", {"say": "hello"})
    assert (one["end"]["type"], one["end"]["code"]) == ("RUN_ERROR", "pipeline_failed")
    assert last(one) == "It is "
    (two,) = agent(site.url, key, "none", {"say": "hello"})
    assert (two["error"]["status"], two["error"]["payload"]["code"]) == (404, "model_not_found")


def test_the_same_run_id_is_the_same_run(site: Server, key: str) -> None:
    """A run that is asked for again is shown again."""
    one, two = agent(site.url, key, "echo", {"say": "long", "runId": "r1"}, {"runId": "r1"})
    assert one["streamId"] == two["streamId"] != ""
    assert two["types"][0] == "RUN_STARTED"


def test_the_page_s_fetch_survives_cuts(site: Server, key: str, tmp_path: Path) -> None:
    """docs/ag-ui.md: a connection that is cut in the middle of a text is a pause, and nothing comes twice."""
    module = tmp_path / "durable.mjs"
    (text,) = [block.text for block in blocks_of("docs/ag-ui.md") if "durableFetch(url" in block.text]
    module.write_text(text)
    for num_bytes in (700, 2500):
        with cutting(site.url, "POST /ag-ui/", num_bytes=num_bytes) as relay:
            (one,) = agent(relay.url, key, "echo", {"say": "long", "props": {"max_tokens": 400}}, durable=str(module))
        assert relay.num_cut == 1
        assert len(relay.requests) == 2
        assert b"last-event-id" in relay.requests[1].lower() or num_bytes < 1000
        assert last(one) == " ".join(f"Word {number}." for number in range(30))
        assert one["end"]["outcome"] == {"type": "success"}


def test_the_page_s_agent_prints_its_answer(site: Server, key: str, node: str) -> None:
    """docs/ag-ui.md: its first program as it stands there, and after it the lines that answer an interrupt."""
    blocks = [block.text for block in blocks_of("docs/ag-ui.md") if block.language == "js"]
    (resume,) = [text for text in blocks if "pendingInterrupts" in text]
    asks = blocks[0].replace("What does it cost?", "drop it")
    programs = {
        blocks[0].replace("What does it cost?", "sky"): "It is sunny. {",
        f"{asks}\n{resume}\nconsole.log(agent.messages.at(-1).content);": "\nDone.\n",
    }
    variables = {"SITE": site.url, "KEY": key, "NO_PROXY": "*"}
    for program, printed in programs.items():
        done = subprocess.run(
            [node, "--input-type=module", "-"],
            input=program,
            env={**os.environ, **variables},
            cwd=FRONT_ENDS,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert printed in done.stdout
