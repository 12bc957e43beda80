"""Sentences with named slots: `The Team plan costs {month} per seat.` and the values beside them. Pure.

A value is text of one line. What is edited is the value; the sentence around it stays, and so does a model's text. A
value that begins with @ is another passage's: `@price-team.month` is what price-team has as `month`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

SLOT = re.compile(r"\{([a-z][a-z0-9_]*)\}")
NAME = re.compile(r"[a-z][a-z0-9_]*")
REFERENCE = re.compile(r"@([a-z0-9-]+)\.([a-z][a-z0-9_]*)")
MAX_SENTENCE_CHARS = 400
MAX_VALUE_CHARS = 200


def fill(template: str, values: Mapping[str, str]) -> str:
    """Return the text with each slot replaced by its value. Raises KeyError for a slot without a value."""
    return SLOT.sub(lambda match: values[match[1]], template)


def referenced_slugs(values: Mapping[str, str]) -> set[str]:
    """Return the passages whose values these values are."""
    return {found[1] for value in values.values() if (found := REFERENCE.fullmatch(value))}


def resolved(values: Mapping[str, str], others: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Return the values, each reference replaced by the value in `others`. Raises KeyError for what is not there."""

    def text_of(value: str) -> str:
        found = REFERENCE.fullmatch(value)
        return others[found[1]][found[2]] if found else value

    return {name: text_of(value) for name, value in values.items()}


def sentence_problems(sentences: Sequence[str]) -> list[str]:
    """Return what is wrong with the sentences of a passage, as sentences."""
    problems = [] if sentences else ["Write one sentence at least: the answer is made of them."]
    for sentence in sentences:
        if len(sentence) > MAX_SENTENCE_CHARS:
            problems.append(f'"{sentence[:40]}…" has more than {MAX_SENTENCE_CHARS} characters. Cut it in two.')
        problems += _brace_problems(sentence)
    return problems


def body_problems(body: str) -> list[str]:
    """Return what is wrong with the braces of a longer text."""
    return _brace_problems(body)


def value_problems(texts: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """Return what is wrong between the slots of `texts` and the values: each has the other."""
    used = {name for text in texts for name in SLOT.findall(text)}
    problems = [f"The slot {{{name}}} has no value. Add a line: {name}: …" for name in sorted(used - values.keys())]
    problems += [
        f"No sentence has the slot {{{name}}}. Add it or remove the value." for name in values if name not in used
    ]
    for name, value in values.items():
        if not NAME.fullmatch(name):
            problems.append(f'"{name}" is no name of a slot: a letter, then letters, digits or _, in lower case.')
        if not value.strip() or len(value) > MAX_VALUE_CHARS or re.search(r"[{}\n\r]", value):
            problems.append(f"The value of {name} is one line of 1 to {MAX_VALUE_CHARS} characters without braces.")
    return problems


def _brace_problems(text: str) -> list[str]:
    rest = SLOT.sub("", text)
    if "{" not in rest and "}" not in rest:
        return []
    at = min(index for index in (rest.find("{"), rest.find("}")) if index >= 0)
    return [f'"{rest[max(0, at - 15) : at + 15]}" has a brace that is no slot. A slot is {{name}}, in lower case.']
