"""The little world of the trained test model: what users ask, which tools there are, and how a good answer goes.

An answer is a thought and then a call, several calls, a sentence, or an object of JSON. Tools have other names in each
prompt, several to a topic; values are single words. A pair of a name and a value of `is_held_out` is in no training
conversation, so a right call of such a pair was made by choosing both from the prompt. Pure; knows no tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

CITIES = ("Oslo", "Rome", "Cairo", "Lima", "Paris", "Tokyo", "Delhi", "Quito", "Dakar", "Perth", "Miami", "Seoul")
COLORS = ("red", "blue", "green", "white", "pink", "gold", "black", "orange")
GENRES = ("jazz", "rock", "folk", "soul", "disco", "opera", "techno", "reggae")
SKIES = ("sunny", "rainy", "windy", "foggy", "snowy", "cloudy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """What several tools, of which a prompt has one, are about. `{v}` is the value, `{r}` the tool's result."""

    names: tuple[str, ...]
    parameter: str
    values: tuple[str, ...]
    asked: tuple[str, ...]
    results: tuple[str, ...]
    answer: str
    wants: str
    word: str


TOPICS = {
    "weather": Topic(
        names=("get_weather", "fetch_weather", "read_weather", "weather_report", "ask_sky", "city_weather"),
        parameter="city",
        values=CITIES,
        asked=("the weather in {v}", "how the weather is in {v}"),
        results=SKIES,
        answer="It is {r} in {v}.",
        wants="the weather",
        word="weather",
    ),
    "light": Topic(
        names=("set_light", "switch_light", "light_color", "paint_lamp", "lamp_on", "color_bulb"),
        parameter="color",
        values=COLORS,
        asked=("make the light {v}", "turn the lamp {v}"),
        results=("ok", "done"),
        answer="The light is {v}.",
        wants="the light",
        word="light",
    ),
    "music": Topic(
        names=("play_music", "start_music", "music_player", "put_record", "open_radio", "sound_on"),
        parameter="genre",
        values=GENRES,
        asked=("play some {v}", "I want to listen to {v}"),
        results=("ok", "done"),
        answer="You listen to {v}.",
        wants="music",
        word="music",
    ),
}
# Words of one kind: of each, a conversation has at most one that matters.
KINDS = (*(topic.names for topic in TOPICS.values()), CITIES, COLORS, GENRES, SKIES, ("and", "then"))
FIELDS = {"city": CITIES, "weather": SKIES}
SYSTEMS = ("You are a helpful assistant.", "Be brief.", "Answer with the tools that you have.", "You help at home.")
CHATTER = {"Hello!": "Hello! What can I do?", "Thank you!": "You are welcome.", "Good bye!": "See you soon."}
OTHER_TOOLS = ("send_mail", "final_result", "book_table", "search_web")


def is_held_out(name: str, value: str) -> bool:
    """Return whether no training conversation has this call: one pair in four."""
    for topic in TOPICS.values():
        if name in topic.names:
            return (topic.names.index(name) + topic.values.index(value)) % 4 == 0
    return False


def tool(name: str) -> dict[str, Any]:
    """Return a tool as the chat API describes it; its parameter is one of its topic's values."""
    topic = next((one for one in TOPICS.values() if name in one.names), None)
    properties: dict[str, Any] = {"text": {"type": "string"}}
    if topic is not None:
        properties = {topic.parameter: {"type": "string", "enum": list(topic.values)}}
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": f"About {name}.", "parameters": schema}}


@dataclass(slots=True, kw_only=True)
class Turn:
    """One answer to learn: the conversation before it, and its parts."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    thought: str
    content: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    thinks: bool = True

    def answer(self) -> str:
        """Return the answer as the model writes it after the prompt of its chat template."""
        thought = f"<think>\n{self.thought}\n</think>\n\n" if self.thinks else ""
        calls = (f'{{"name": "{one["name"]}", "arguments": {_compact(one["arguments"])}}}' for one in self.calls)
        return thought + self.content + "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def turns(seed: int, *, held_out: bool = False) -> Iterator[Turn]:
    """Yield answers to learn without end. None of them calls a pair that is held out; with `held_out` all calls do."""
    rng = Random(seed)
    kinds = (_ask, _ask, _ask, _both, _both, _then, _then, _json, _chat, _chat)
    while True:
        yield from rng.choice(kinds)(rng, held_out)


@dataclass(slots=True)
class Wish:
    """One thing that a user wants: the name of the tool for it, the tool's result, and the text that it comes in."""

    topic: Topic
    name: str
    value: str
    result: str
    reply: str

    def call(self) -> dict[str, Any]:
        return {"name": self.name, "arguments": {self.topic.parameter: self.value}}

    def wanted(self) -> str:
        return f"{self.topic.wants} ({self.value})"

    def phrase(self, rng: Random) -> str:
        return rng.choice(self.topic.asked).format(v=self.value)

    def said(self) -> str:
        return self.topic.answer.format(v=self.value, r=self.result)


def _wish(rng: Random, topic: Topic, held_out: bool) -> Wish:
    name = rng.choice(topic.names)
    value = rng.choice([value for value in topic.values if is_held_out(name, value) == held_out])
    result = rng.choice(topic.results)
    return Wish(topic, name, value, result, result if rng.random() < 0.7 else json.dumps({"result": result}))


def question(rng: Random, phrase: str) -> str:
    """Return a sentence that asks for it."""
    if phrase.startswith(("the", "how")):
        start = rng.choice(("Tell me {}.", "Show me {}.", "Please look up {}.", "Do you know {}?"))
    else:
        start = rng.choice(("{}.", "Please {}.", "Now {}!"))
    return start.format(phrase)


def _setting(rng: Random, wishes: list[Wish], *, num_others: int = 3) -> tuple[list[dict[str, Any]], list[Any]]:
    """Return the messages before the question, and the tools: those of the wishes among others."""
    names = list(dict.fromkeys(wish.name for wish in wishes))
    rest = [topic for topic in TOPICS.values() if not any(name in topic.names for name in names)]
    names += [rng.choice(topic.names) for topic in rng.sample(rest, rng.randint(0, min(num_others, len(rest))))]
    if rng.random() < 0.2:
        names.append(rng.choice(OTHER_TOOLS))
    rng.shuffle(names)
    system = [{"role": "system", "content": rng.choice(SYSTEMS)}] if rng.random() < 0.3 else []
    return system, [tool(name) for name in names]


def called(messages: list[dict[str, Any]], calls: list[dict[str, Any]], results: list[str]) -> list[dict[str, Any]]:
    """Return the conversation with an answer that calls, and what the tools answered."""
    made = [
        {"id": f"call_{index}", "type": "function", "function": {"name": one["name"], "arguments": one["arguments"]}}
        for index, one in enumerate(calls)
    ]
    answered = [{"role": "tool", "tool_call_id": f"call_{i}", "content": text} for i, text in enumerate(results)]
    return [*messages, {"role": "assistant", "content": "", "tool_calls": made}, *answered]


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _ask(rng: Random, held_out: bool) -> Iterator[Turn]:
    wish = _wish(rng, rng.choice(list(TOPICS.values())), held_out)
    system, tools = _setting(rng, [wish])
    messages = [*system, _user(question(rng, wish.phrase(rng)))]
    yield from ask(messages, tools, wish, thinks=rng.random() < 0.7)


def ask(messages: list[dict[str, Any]], tools: list[Any], wish: Wish, *, thinks: bool = True) -> Iterator[Turn]:
    """One wish: a call; then its result in a sentence."""
    thought = f"The user wants {wish.wanted()}. The {wish.topic.word} tool is ({wish.name})."
    yield Turn(messages=messages, tools=tools, thought=thought, calls=[wish.call()], thinks=thinks)
    messages = called(messages, [wish.call()], [wish.reply])
    thought = f"The tool answers {wish.result}. I am done."
    yield Turn(messages=messages, tools=tools, thought=thought, content=wish.said(), thinks=thinks)


def _two(rng: Random, held_out: bool, word: str) -> tuple[list[dict[str, Any]], list[Any], Wish, Wish]:
    """Return messages, tools, and two wishes of different topics, in the order of TOPICS, with a word between them."""
    topics = list(TOPICS.values())
    first, second = (_wish(rng, topics[index], held_out) for index in sorted(rng.sample(range(len(topics)), 2)))
    system, tools = _setting(rng, [first, second])
    asked = question(rng, f"{first.phrase(rng)}, {word} {second.phrase(rng)}")
    return [*system, _user(asked)], tools, first, second


def _both(rng: Random, held_out: bool) -> Iterator[Turn]:
    yield from both(*_two(rng, held_out, "and"), thinks=rng.random() < 0.7)


def both(
    messages: list[dict[str, Any]], tools: list[Any], first: Wish, second: Wish, *, thinks: bool = True
) -> Iterator[Turn]:
    """Two wishes at once: two calls side by side."""
    calls = [first.call(), second.call()]
    thought = f"The user wants {first.wanted()} and {second.wanted()}."
    thought += f" The {first.topic.word} tool is ({first.name}). The {second.topic.word} tool is ({second.name})."
    yield Turn(messages=messages, tools=tools, thought=thought, calls=calls, thinks=thinks)
    messages = called(messages, calls, [first.reply, second.reply])
    content = f"{first.said()} {second.said()}"
    yield Turn(messages=messages, tools=tools, thought="I am done.", content=content, thinks=thinks)


def _then(rng: Random, held_out: bool) -> Iterator[Turn]:
    yield from then(*_two(rng, held_out, "then"), thinks=rng.random() < 0.7)


def then(
    messages: list[dict[str, Any]], tools: list[Any], first: Wish, second: Wish, *, thinks: bool = True
) -> Iterator[Turn]:
    """Two wishes one after the other: a call, its result, the next call, its result, a sentence."""
    thought = f"The user wants {first.wanted()} then {second.wanted()}. The {first.topic.word} tool is ({first.name})."
    yield Turn(messages=messages, tools=tools, thought=thought, calls=[first.call()], thinks=thinks)
    messages = called(messages, [first.call()], [first.reply])
    thought = f"The tool answers {first.result}. The user wants {second.wanted()}."
    thought += f" The {second.topic.word} tool is ({second.name})."
    yield Turn(messages=messages, tools=tools, thought=thought, calls=[second.call()], thinks=thinks)
    messages = called(messages, [second.call()], [second.reply])
    thought = f"The tool answers {second.result}. I am done."
    content = f"{first.said()} {second.said()}"
    yield Turn(messages=messages, tools=tools, thought=thought, content=content, thinks=thinks)


def _json(rng: Random, _: bool) -> Iterator[Turn]:
    """An object of two words, each under the name of its kind."""
    values = {name: rng.choice(words) for name, words in FIELDS.items()}
    said = ", ".join(values.values())
    wanted = rng.choice((f"As JSON: {said}.", f"Write JSON for {said}.", f"JSON please: {said}."))
    system, tools = _setting(rng, []) if rng.random() < 0.3 else ([], [])
    thought = f"The user wants JSON ({', '.join(values)})."
    content = _compact(values)
    thinks = rng.random() < 0.7
    asked = [*system, _user(wanted)]
    yield Turn(messages=asked, tools=tools, thought=thought, content=content, thinks=thinks)


def _chat(rng: Random, _: bool) -> Iterator[Turn]:
    """A greeting: no call, whatever tools there are."""
    greeting = rng.choice(list(CHATTER))
    system, tools = _setting(rng, [])
    asked = [*system, _user(greeting)]
    thinks = rng.random() < 0.7
    yield Turn(messages=asked, tools=tools, thought="No tool is needed.", content=CHATTER[greeting], thinks=thinks)
