"""The phrase lists that the corpus is made of: the TOML files here, each of which says what it holds."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Texts = tuple[str, ...]

_FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Language:
    """The help desk in another language. `facts`, in the order of TRANSLATED_FACTS: question, question, answer."""

    name: str
    greetings: Texts
    greeting: str
    thanks: Texts
    welcome: str
    off_topic: Texts
    refusal: str
    facts: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """One field of an account; `answer` has one `{v}` for the value the tool gave back."""

    field: str
    questions: Texts
    values: Texts
    answer: str


def _read(name: str) -> dict[str, Any]:
    """Return a file's content, with tuples for lists."""
    return _frozen(tomllib.loads((_FOLDER / f"{name}.toml").read_text(encoding="utf-8")))


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _frozen(one) for key, one in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


_aspects, _everyday, _follow_ups, _off_topic = map(_read, ("aspects", "everyday", "follow_ups", "off_topic"))
_languages, _lookups, _wording = map(_read, ("languages", "lookups", "wording"))

# Frames by aspect; what fills them, by fact and aspect.
ASPECTS: dict[str, Texts] = _aspects["aspects"]
ASKED: dict[str, dict[str, Texts]] = _aspects["asked"]

EVERYDAY: Texts = _everyday["templates"]
EVERYDAY_SLOTS: dict[str, Texts] = _everyday["slots"]
TEMPLATES: Texts = _off_topic["templates"]
SLOTS: dict[str, Texts] = _off_topic["slots"]
SENTENCES: Texts = _off_topic["sentences"]
REFUSALS: Texts = _off_topic["refusals"]

# (first fact, what is said, second fact)
FOLLOW_UPS: tuple[tuple[str, Texts, str], ...] = tuple(
    (one["after"], one["said"], one["means"]) for one in _follow_ups["follow_up"]
)
REPEATS: Texts = _follow_ups["repeats"]
SITUATIONS: dict[str, Texts] = _read("situations")["situations"]
# (what is said, replies)
SMALL_TALK: tuple[tuple[Texts, Texts], ...] = tuple(
    (one["said"], one["replies"]) for one in _read("small_talk")["small_talk"]
)

TRANSLATED_FACTS: Texts = _languages["translated_facts"]
LANGUAGES: tuple[Language, ...] = tuple(Language(**one) for one in _languages["language"])
LOOKUPS: tuple[Lookup, ...] = tuple(Lookup(**one) for one in _lookups["lookup"])
WAITING: Texts = _lookups["waiting"]

GREETING_PREFIXES: Texts = _wording["greeting_prefixes"]
FRAMES: Texts = _wording["frames"]
TURN_FRAMES: Texts = _wording["turn_frames"]
SYSTEM_PROMPTS: Texts = _wording["system_prompts"]
THINK_SYSTEM: str = _wording["think_system"]
THINK_REQUESTS: Texts = _wording["think_requests"]
EMOJI_REQUESTS: Texts = _wording["emoji_requests"]
OVERVIEW_REQUESTS: Texts = _wording["overview_requests"]
OPENINGS: dict[str, Texts] = _wording["openings"]
SYNONYMS: dict[str, Texts] = _wording["synonyms"]
TOPIC_EMOJI: dict[str, str] = _wording["topic_emoji"]
