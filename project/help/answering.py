"""Answers that come from passages: which texts a model may say, and what readers see of them. Pure.

A small model cannot copy a price that it has not learnt. So it is allowed the sentences of the selected passages alone,
with their slots; it chooses among them, and the slots are filled on the way to the reader:

    allowed   The Team plan costs {0.month} per seat a month, with a minimum of {0.minimum}.
    shown     The Team plan costs $15 per seat a month, with a minimum of two seats. [1]

The number of a passage stands behind its last sentence. The number in a slot is that of the passage, so that two
passages may use the same name. A large model reads the passages and quotes them itself, with the number of each in
brackets (`Markers`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from project.help.search import Hit
from project.help.slots import SLOT

MAX_SENTENCES = 3
Cite = Callable[[Hit], None]


@dataclass(slots=True)
class Citations:
    """The passages that an answer has cited, numbered in the order of their first use."""

    cite: Cite
    _numbers: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._numbers)

    def number(self, passage: Hit) -> int:
        """Return the passage's number; cite it if this is its first."""
        if passage["slug"] not in self._numbers:
            self._numbers[passage["slug"]] = len(self._numbers) + 1
            self.cite(passage)
        return self._numbers[passage["slug"]]


def numbered(passage: Hit, index: int) -> list[str]:
    """Return the sentences of the passage at `index`, with that number in their slots."""
    return [SLOT.sub(lambda match: f"{{{index}.{match[1]}}}", sentence) for sentence in passage["sentences"]]


def allowed_answers(passages: Sequence[Hit], most: int = MAX_SENTENCES) -> list[str]:
    """Return the texts that a model may answer: passages one after the other, each whole if it has room.

    A passage that alone has more than `most` sentences gives its first sentences.
    """
    each = [numbered(passage, index)[:most] for index, passage in enumerate(passages)]

    def texts(chosen: tuple[int, ...], left: int) -> Iterator[str]:
        if chosen:
            yield " ".join(sentence for index in chosen for sentence in each[index])
        for index, sentences in enumerate(each):
            if index not in chosen and len(sentences) <= left:
                yield from texts((*chosen, index), left - len(sentences))

    return list(dict.fromkeys(texts((), most)))


class SlotFiller:
    """An output filter: fills slots, and cites the passage of each sentence as soon as the text is its alone.

    What is held back is a slot that is not whole. A slot whose text is cut stays unshown.
    """

    def __init__(self, passages: Sequence[Hit], citations: Citations) -> None:
        self._passages, self._citations = passages, citations
        self._sentences = [
            (sentence, index) for index, passage in enumerate(passages) for sentence in numbered(passage, index)
        ]
        self._said = ""  # of the sentence so far, with its slots
        self._slot = ""  # a slot of which the end has not come
        self._owed = ""  # the mark of a passage whose last sentence has not come

    def feed(self, text: str) -> str:
        """Take the next text of the model, and return what readers may see by now."""
        return "".join(map(self._take, text))

    def flush(self) -> str:
        """Return the mark of a passage that was cut; half a slot is not shown."""
        return self._owed

    def _take(self, character: str) -> str:
        if not self._said and character == " ":  # between two sentences
            return character
        self._said += character
        shown = self._fill(character)
        possible = [(sentence, index) for sentence, index in self._sentences if sentence.startswith(self._said)]
        if len({index for _, index in possible}) != 1:
            return shown
        number = self._citations.number(self._passages[possible[0][1]])
        if all(sentence != self._said for sentence, _ in possible):
            return shown
        is_last = self._said == self._last_sentence(possible[0][1])
        self._said, self._owed = "", "" if is_last else f" [{number}]"
        return f"{shown} [{number}]" if is_last else shown

    def _last_sentence(self, index: int) -> str:
        return numbered(self._passages[index], index)[:MAX_SENTENCES][-1]

    def _fill(self, character: str) -> str:
        if not self._slot and character != "{":
            return character
        self._slot += character
        if character != "}":
            return ""
        index, _, name = self._slot[1:-1].partition(".")
        self._slot = ""
        return self._passages[int(index)]["values"][name]


class Markers:
    """An output filter: the `[2]` of a model becomes a citation's number; a mark that names no passage is left out."""

    _MARKER = re.compile(r" ?\[(\d{1,2})\]")
    _BEGUN = re.compile(r" ?(?:\[\d{0,2})?\Z")  # matches at the end of every text, if only the empty one

    def __init__(self, passages: Sequence[Hit], citations: Citations) -> None:
        self._passages, self._citations = passages, citations
        self._held = ""

    def feed(self, text: str) -> str:
        """Take the next text of the model, and return what readers may see by now."""
        text = self._held + text
        begun = self._BEGUN.search(text)
        assert begun is not None
        self._held = text[begun.start() :]
        return self._MARKER.sub(self._number, text[: begun.start()])

    def flush(self) -> str:
        """Return what was held back: it became no marker."""
        rest, self._held = self._held, ""
        return rest

    def _number(self, match: re.Match[str]) -> str:
        index = int(match[1]) - 1
        if not 0 <= index < len(self._passages):
            return ""
        return f"{match[0].partition('[')[0]}[{self._citations.number(self._passages[index])}]"
