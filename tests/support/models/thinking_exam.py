"""What the trained test model must answer to the letter before it is used: turns that its first round has not seen.

They are of two kinds: conversations that the tests have, and many others of the same world with calls that are held
out. An answer counts if each of its tokens beats all others by MARGIN, so that another order of additions, on another
machine or in the engine, does not change it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from tests.support.models import thinking_world as world
from tests.support.models.thinking_world import Turn, Wish

_SEED, _NUM_TURNS = 1_000_003, 150
MARGIN = 0.1  # of a logit; the engine's differ from the trainer's by about 1e-5


def turns() -> list[Turn]:
    """Return all turns of the exam."""
    return [*_asked_by_tests(), *islice(world.turns(_SEED, held_out=True), _NUM_TURNS)]


def _asked_by_tests() -> Iterator[Turn]:
    """Yield the conversations of tests/e2e/clients and tests/engine/grammar."""
    hello, idle = _user("Hello!"), "No tool is needed."
    system = {"role": "system", "content": world.SYSTEMS[0]}
    for messages, thinks in (([hello], True), ([hello], False), ([system, hello], True)):
        yield Turn(messages=messages, thought=idle, content=world.CHATTER["Hello!"], thinks=thinks)
    thought, content = "The user wants JSON (city, weather).", '{"city":"Rome","weather":"sunny"}'
    yield Turn(messages=[_user("As JSON: Rome, sunny.")], thought=thought, content=content)
    tools = [world.tool(name) for name in ("set_light", "get_weather", "put_record")]
    for some in (tools, tools[1:2]):
        yield from world.ask([_user("Tell me the weather in Oslo.")], some, _weather("Oslo", "foggy"))
        yield from world.ask([_user("Tell me the weather in Paris.")], some, _weather("Paris", "foggy"))
    lamp = Wish(world.TOPICS["light"], "set_light", "red", "ok", "ok")
    asked = _user("Tell me the weather in Paris, and turn the lamp red.")
    yield from world.both([asked], tools, _weather("Paris", "foggy"), lamp)
    disco = Wish(world.TOPICS["music"], "put_record", "disco", "ok", "ok")
    asked = _user("Tell me the weather in Dakar, then play some disco.")
    yield from world.then([asked], tools, _weather("Dakar", "windy"), disco)


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _weather(city: str, sky: str) -> Wish:
    return Wish(world.TOPICS["weather"], "get_weather", city, sky, sky)


def failed(model: Any, rows: Iterable[tuple[list[int], int]]) -> list[tuple[list[int], int]]:
    """Return the turns, ids and the prompt's length, whose answer has a token without the margin."""
    import torch

    wrong = []
    with torch.no_grad():
        for ids, num_before in rows:
            hidden = model.model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state
            logits = model.lm_head(hidden[0, num_before - 1 : -1])  # (num_answer_tokens, vocab_size)
            right = torch.tensor(ids[num_before:])[:, None]
            others = logits.scatter(1, right, -torch.inf).amax(1)
            if bool((logits.gather(1, right)[:, 0] - others < MARGIN).any()):
                wrong.append((ids, num_before))
    return wrong
