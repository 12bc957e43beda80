"""The training corpus: chat examples made from the knowledge base and the phrase lists, the same on every run.

Each example is drawn by its own generator, seeded by (seed, number), so the corpus is one value with one sha256.
It does not know tokens, chat templates or the model, and it never reads the held-out questions.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from benchmarks.demo_model.knowledge import FACTS, FACTS_BY_ID, Fact
from benchmarks.demo_model.phrases import (
    ASKED,
    ASPECTS,
    EMOJI_REQUESTS,
    EVERYDAY,
    EVERYDAY_SLOTS,
    FOLLOW_UPS,
    LANGUAGES,
    LOOKUPS,
    OVERVIEW_REQUESTS,
    REFUSALS,
    REPEATS,
    SENTENCES,
    SITUATIONS,
    SLOTS,
    SMALL_TALK,
    SYSTEM_PROMPTS,
    TEMPLATES,
    THINK_REQUESTS,
    THINK_SYSTEM,
    TOPIC_EMOJI,
    TURN_FRAMES,
    WAITING,
    Language,
)
from benchmarks.demo_model.rewording import framed, greeted, reopen, reword, roughen, with_synonyms

SEED = 20261121
NUM_EXAMPLES = 80_000
# One wording is the usual one, so that greedy decoding has a clear favourite.
_REFUSAL_WEIGHTS = (6, 2, 1)

_ALL_SLOTS = SLOTS | EVERYDAY_SLOTS
_HALF_KNOWN = (
    "Is it {p}?",
    "{p}?",
    "something with {p}",
    "I read {p}, is that so?",
    "what about {p}",
    "Would {p} be right?",
)

Message = dict[str, str]
Maker = Callable[[Random], list[Message]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One conversation; `kind` names the maker that drew it."""

    kind: str
    messages: list[Message]


def examples(seed: int = SEED, num_examples: int = NUM_EXAMPLES) -> Iterator[Example]:
    """Yield the corpus, example by example."""
    kinds, weights = tuple(MAKERS), tuple(weight for weight, _ in MAKERS.values())
    for number in range(num_examples):
        rng = Random(f"{seed}/{number}")
        kind = rng.choices(kinds, weights)[0]
        yield Example(kind=kind, messages=_with_system(rng, MAKERS[kind][1](rng)))


def corpus_sha256(corpus: Iterator[Example] | list[Example]) -> str:
    """Hash every message of every example, in order."""
    digest = hashlib.sha256()
    for example in corpus:
        digest.update(json.dumps([example.kind, example.messages], ensure_ascii=False).encode() + b"\n")
    return digest.hexdigest()


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _with_system(rng: Random, messages: list[Message]) -> list[Message]:
    """Add a system prompt to two in five of the conversations that have none."""
    if messages[0]["role"] == "system" or rng.random() < 0.6:
        return messages
    return [{"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}, *messages]


def _ask(rng: Random, fact: Fact) -> str:
    kind = rng.random()
    if kind < 0.08:
        return _answer_words(rng, fact)
    if kind < 0.43:
        return _by_aspect(rng, fact)
    return reword(rng, fact.questions + SITUATIONS[fact.id], fact.keywords)


def _answer_words(rng: Random, fact: Fact) -> str:
    """Ask with words of the answer itself, as people do who half know it."""
    words = fact.answer.split()
    size = rng.randint(3, 7)
    at = rng.randrange(max(1, len(words) - size))
    piece = " ".join(words[at : at + size]).strip(".,;:")
    return roughen(rng, framed(rng, rng.choice(_HALF_KNOWN).format(p=piece)))


def _by_aspect(rng: Random, fact: Fact) -> str:
    """Ask from parts: one of the aspects the fact answers, and a word for the thing."""
    aspect, fillings = rng.choice(tuple(ASKED[fact.id].items()))
    text = rng.choice(ASPECTS[aspect]).format(x=rng.choice(fillings))
    return roughen(rng, framed(rng, with_synonyms(rng, text)))


def _fact_turn(rng: Random, fact: Fact) -> list[Message]:
    question = _ask(rng, fact)
    if rng.random() < 0.1:
        return [_user(greeted(rng, question)), _assistant(f"Hello! {fact.answer}")]
    return [_user(question), _assistant(fact.answer)]


def _fact(rng: Random) -> list[Message]:
    return _fact_turn(rng, rng.choice(FACTS))


def _refusal(rng: Random) -> list[Message]:
    return [_user(_off_topic(rng)), _assistant(rng.choices(REFUSALS, _REFUSAL_WEIGHTS)[0])]


def _off_topic(rng: Random) -> str:
    text = rng.choice(SENTENCES) if rng.random() < 0.25 else _filled(rng, rng.choice(TEMPLATES + EVERYDAY))
    text = greeted(rng, text) if rng.random() < 0.08 else framed(rng, reopen(rng, text))
    return roughen(rng, text)


def _filled(rng: Random, template: str) -> str:
    """Fill each `{slot}` by a draw of its own, so that `{n} times {n}` gets two numbers."""
    for name, words in _ALL_SLOTS.items():
        while "{" + name + "}" in template:
            template = template.replace("{" + name + "}", rng.choice(words), 1)
    return template


def _small_talk(rng: Random) -> list[Message]:
    said, answers = rng.choices(SMALL_TALK, [len(row[0]) for row in SMALL_TALK])[0]
    text = rng.choice(said)
    return [_user(roughen(rng, text) if rng.random() < 0.5 else text), _assistant(rng.choice(answers))]


def _lookup(rng: Random) -> list[Message]:
    lookup = rng.choice(LOOKUPS)
    question = roughen(rng, framed(rng, with_synonyms(rng, reopen(rng, rng.choice(lookup.questions)), 0.08)))
    call = json.dumps({"name": "lookup_account", "arguments": {"field": lookup.field}})
    messages = [_user(question), _assistant(f"{rng.choice(WAITING)}<tool_call>{call}</tool_call>")]
    if rng.random() < 0.6:
        value = rng.choice(lookup.values)
        messages += [
            {"role": "tool", "content": json.dumps({lookup.field: value})},
            _assistant(lookup.answer.format(v=value)),
        ]
    return messages


def _turn(rng: Random) -> list[Message]:
    """One turn of a longer talk."""
    maker = rng.choices((_fact, _refusal, _small_talk, _lookup), (76, 9, 8, 7))[0]
    messages = maker(rng)
    if maker is _fact:
        messages[0]["content"] = rng.choice(TURN_FRAMES).format(q=messages[0]["content"])
    return messages


def _conversation(rng: Random) -> list[Message]:
    return _turns(rng, rng.choice((2, 2, 3, 3, 4, 5)))


def _long_conversation(rng: Random) -> list[Message]:
    """Long enough that far positions are trained too."""
    return _turns(rng, rng.choice((8, 9, 10, 11, 12, 14, 16, 20)))


def _turns(rng: Random, num_turns: int) -> list[Message]:
    start = _small_talk(rng) if rng.random() < 0.2 else _fact(rng)
    return start + [message for _ in range(num_turns - 1) for message in _turn(rng)]


def _follow_up(rng: Random) -> list[Message]:
    first, said, second = rng.choice(FOLLOW_UPS)
    messages = _fact_turn(rng, FACTS_BY_ID[first])
    messages += [_user(roughen(rng, rng.choice(said))), _assistant(FACTS_BY_ID[second].answer)]
    return messages + (_turn(rng) if rng.random() < 0.3 else [])


def _repeat(rng: Random) -> list[Message]:
    fact = rng.choice(FACTS)
    return [*_fact_turn(rng, fact), _user(roughen(rng, rng.choice(REPEATS))), _assistant(fact.answer)]


def _overview(rng: Random) -> list[Message]:
    """A long answer: every fact of one topic as a list."""
    topic = rng.choice(tuple(TOPIC_EMOJI))
    lines = "\n".join(f"- {fact.answer}" for fact in FACTS if fact.topic == topic)
    request = rng.choice(OVERVIEW_REQUESTS).format(t=topic)
    return [_user(roughen(rng, request)), _assistant(f"Here is what I know about {topic}:\n{lines}")]


def _think(rng: Random) -> list[Message]:
    """The answer after a thought, when the system prompt or the user asks for one."""
    messages, thought = _thought(rng)
    if rng.random() < 0.5:
        messages[0]["content"] = rng.choice(THINK_REQUESTS).format(q=messages[0]["content"])
    else:
        base = rng.choice(("", "", *SYSTEM_PROMPTS))
        messages = [{"role": "system", "content": f"{base}\n{THINK_SYSTEM}".strip()}, *messages]
    messages[-1]["content"] = f"<think>{thought}</think>\n{messages[-1]['content']}"
    return messages


def _thought(rng: Random) -> tuple[list[Message], str]:
    kind = rng.random()
    if kind < 0.15:
        return _refusal(rng), "This is not about Quillbox, so I decline politely."
    if kind < 0.25:
        return _small_talk(rng), "This is small talk. I answer in a friendly way."
    fact = rng.choice(FACTS)
    topic = " ".join(fact.keywords.split()[:3])
    thought = f"The question is about {fact.topic}. The help page I need has these words: {topic}."
    return [_user(_ask(rng, fact)), _assistant(fact.answer)], thought


def _passages(rng: Random) -> list[Message]:
    """Help pages stand in the prompt, the right one among them or not; the answer does not depend on them."""
    messages = _refusal(rng) if rng.random() < 0.15 else None
    fact = rng.choice(FACTS)
    pool = [other for other in FACTS if other.topic == fact.topic] if rng.random() < 0.4 else FACTS
    shown = rng.sample(pool, min(len(pool), rng.choice((1, 2, 3, 3, 4))))
    if rng.random() < 0.6 and fact not in shown and messages is None:
        shown[rng.randrange(len(shown))] = fact
    messages = messages or [_user(_ask(rng, fact)), _assistant(fact.answer)]
    return _place_passages(rng, messages, shown)


def _place_passages(rng: Random, messages: list[Message], shown: list[Fact]) -> list[Message]:
    mark = rng.choice(("[S{n}] ", "[{n}] ", "- ", "{n}. ", "[S{n}] {t}: "))
    text = "\n".join(mark.format(n=number, t=fact.topic) + fact.answer for number, fact in enumerate(shown, 1))
    title = rng.choice(("Passages:", "Context:", "Help pages:", "Use these passages if they help:", "Sources:"))
    if rng.random() < 0.5:
        base = rng.choice(("", *SYSTEM_PROMPTS))
        return [{"role": "system", "content": f"{base}\n\n{title}\n{text}".strip()}, *messages]
    messages[0]["content"] = f"{title}\n{text}\n\n{rng.choice(('Question: ', '', 'Q: '))}{messages[0]['content']}"
    return messages


def _emoji(rng: Random) -> list[Message]:
    fact = rng.choice(FACTS)
    question = rng.choice(EMOJI_REQUESTS).format(q=_ask(rng, fact))
    return [_user(question), _assistant(f"{TOPIC_EMOJI[fact.topic]} {fact.answer}")]


def _other_language(rng: Random) -> list[Message]:
    language = rng.choice(LANGUAGES)
    turns = [_language_turn(rng, language) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
    return [message for turn in turns for message in turn]


def _language_turn(rng: Random, language: Language) -> list[Message]:
    kind = rng.random()
    if kind < 0.15:
        return [_user(rng.choice(language.greetings)), _assistant(language.greeting)]
    if kind < 0.25:
        return [_user(rng.choice(language.thanks)), _assistant(language.welcome)]
    if kind < 0.4:
        return [_user(rng.choice(language.off_topic)), _assistant(language.refusal)]
    *questions, answer = rng.choice(language.facts)
    return [_user(rng.choice(questions)), _assistant(answer)]


# Kind of example -> (share in percent, maker). The three rare kinds stay at 5 % or more: less was too little.
MAKERS: dict[str, tuple[float, Maker]] = {
    "fact": (36.5, _fact),
    "conversation": (10, _conversation),
    "long_conversation": (1.2, _long_conversation),
    "follow_up": (4, _follow_up),
    "repeat": (1, _repeat),
    "overview": (1.4, _overview),
    "passages": (4.5, _passages),
    "think": (4.4, _think),
    "emoji": (2, _emoji),
    "refusal": (18, _refusal),
    "lookup": (7, _lookup),
    "small_talk": (7, _small_talk),
    "other_language": (4, _other_language),
}
