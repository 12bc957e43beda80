"""Files of text in a message: how their text stands in the prompt, and where it may be cut. Pure.

    <file name="bill.csv">          the files come first, in the order in which they were attached
    month,total                 ◄── Attached.start
    May,9.90                    ◄── Attached.end, behind it
    </file>

    What was June's?            ◄── Message.words_start

The words are the same at every later turn, so that the engine finds them in its prefix cache: how much of a text is
kept is decided once, when its message is asked, and stored with it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from streamserve.protocol.requests import Attached, Message

_NOT_IN_NAMES = re.compile(r'[\x00-\x1f\x7f"<>&]')
_TAG = re.compile(r"<(?=/?file\b)", re.IGNORECASE)
_CLOSING = "\n</file>\n\n"
_MOST_CHARS = 2_000  # of a piece: a longer paragraph is cut between its lines, a longer line anywhere
_PARAGRAPH = re.compile(rf"(?s).{{1,{_MOST_CHARS}}}?(?:\n[ \t]*\n\s*|\Z)")
_LINES = re.compile(rf"(?s).{{1,{_MOST_CHARS}}}(?:\n|\Z)|.{{1,{_MOST_CHARS}}}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFile:
    """A file of text. With `is_cut` the text is its first part."""

    name: str
    type: str
    text: str
    is_cut: bool = False


def message_of(words: str, files: Sequence[TextFile], kept: Sequence[int] | None = None, param: str = "") -> Message:
    """Return the user's message of these words and files; `kept`: how many characters of each file it has."""
    parts, attached, at = list[str](), list[Attached](), 0
    for index, file in enumerate(files):
        # No text ends its own file, nor begins another. No character more or less, as `kept` counts them.
        text = _TAG.sub("‹", file.text)
        num_kept = len(text) if kept is None else min(kept[index], len(text))
        is_cut = file.is_cut or num_kept < len(text)
        opening = f'<file name="{_NOT_IN_NAMES.sub("_", file.name)}"{" cut" if is_cut else ""}>\n'
        start = at + len(opening)
        parts += opening, text[:num_kept], _CLOSING
        attached.append(Attached(name=file.name, type=file.type, start=start, end=start + num_kept, is_cut=is_cut))
        at = start + num_kept + len(_CLOSING)
    content = "".join([*parts, words])
    return Message(role="user", content=content, param=param, attached=tuple(attached), words_start=at)


def files_of(message: Message) -> list[TextFile]:
    """Return the files of a message, with the text that the prompt has of them."""
    return [
        TextFile(name=one.name, type=one.type, text=message.content[one.start : one.end], is_cut=one.is_cut)
        for one in message.attached
    ]


def cut(message: Message, kept: Sequence[int]) -> Message:
    """Return the message with so many characters of each of its files."""
    return message_of(message.words, files_of(message), kept, message.param)


def piece_ends(text: str) -> list[int]:
    """Return where a text may be cut: behind each paragraph, and inside long paragraphs behind lines."""
    ends, at = list[int](), 0
    while at < len(text):
        found = _PARAGRAPH.match(text, at) or _LINES.match(text, at)
        assert found is not None
        at = found.end()
        ends.append(at)
    return ends


def kept_of(ends: Sequence[Sequence[int]], num_pieces: int) -> tuple[int, ...]:
    """Return how many characters of each file the first pieces of all files have, by their `piece_ends`."""
    kept = list[int]()
    for of_file in ends:
        num_taken = min(num_pieces, len(of_file))
        kept.append(of_file[num_taken - 1] if num_taken else 0)
        num_pieces -= num_taken
    return tuple(kept)
