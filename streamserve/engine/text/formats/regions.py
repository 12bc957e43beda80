"""`Markup`: a model's thoughts and calls as regions of its text, and `RegionParser`, which finds them as they come.

    text ── opening of a region ──► region ── its closing ──► text, without the white space that follows

A region's text is a block's text, or a call. What may still become a tag is held back, and nothing else. A call that
does not hold together is text, from its opening on; a call that breaks after its name was passed on is closed there, so
that its arguments do not parse, and the rest is text. (Idea of partial matches: transformers' ResponseParser.) Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from streamserve.engine.text.formats.base import Closed, Made, Markup, Opened, Part, Tags, Written
from streamserve.engine.text.formats.json_call import Call, CallReader
from streamserve.protocol.events import BLOCK_KINDS
from streamserve.protocol.requests import Tool

TEXT, THINKING, TOOL_USE = BLOCK_KINDS
# Regions that are their opening alone: markup between calls, and between blocks of any kind.
CALLS, BETWEEN = "calls", "between"
_MAX_OPENING = 1_024  # characters: a longer opening is text
_MAX_WHOLE = 65_536  # characters of a region whose calls are read as a whole
_MAX_CLOSING = 256
_MORE = "\n…more text follows"  # stands for what a cut answer lacks, so that a closing that only waits for it is found
_MOST_KNOWN = 65_536  # characters that are remembered


# A region's text, the groups of its opening, the request's tools by name → its calls, None if they do not parse.
Read = Callable[[str, Mapping[str, str], Mapping[str, Tool]], list[Call] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """One kind of region. `opening`, `closing` and `separator` are regular expressions with «tags».

    A tool_use region holds calls, `separator` between them: each the JSON object of a whole call, or its arguments
    where `opening` has the group `name`. Without `closing` it ends with its last call. `is_first`: it stands at the
    beginning of the answer only, and calls no tool that the request does not have. One of kind CALLS or BETWEEN is its
    opening alone. `can_grow`: an opening at the end of the text may still become longer. `read` returns the calls of a
    region's text where they come as a whole, None if they do not parse.
    """

    kind: str
    opening: str
    closing: str = ""
    separator: str = ""
    is_first: bool = False
    can_grow: bool = False
    read: Read | None = None


@dataclass(frozen=True, slots=True)
class _Patterns:
    """A region compiled for one tokenizer."""

    region: Region
    opening: Any
    closing: Any
    separator: Any
    closes: dict[str, bool]  # whether a character may be the first of its closing, white space before it apart

    def can_close(self, text: str) -> bool:
        """Return whether the closing may begin in `text`."""
        if self.closing is None or not text:
            return False
        if text[-1].isspace():
            return True
        return _has_one(text, self.closes, lambda one: not one.isspace() and bool(self._begins(one)))

    def _begins(self, character: str) -> Any:
        return self.closing.match(character, partial=True)


class Regions:
    """The regions of a format, compiled for a tokenizer's tags."""

    def __init__(self, regions: tuple[Region, ...], tags: Tags) -> None:
        import regex  # `re` has no partial matches

        def compiled(source: str) -> Any:
            return regex.compile(tags.pattern(source), regex.DOTALL) if source else None

        self.tags = tags
        self.all = tuple(
            _Patterns(one, compiled(one.opening), compiled(one.closing), compiled(one.separator), {}) for one in regions
        )
        self._begins: dict[str, bool] = {}  # whether a character may be the first of an opening

    def can_begin(self, text: str) -> bool:
        """Return whether an opening may begin in `text`; those at the beginning of the answer apart."""
        return _has_one(text, self._begins, self._can_begin)

    def _can_begin(self, character: str) -> bool:
        return any(one.opening.match(character, partial=True) for one in self.all if not one.region.is_first)

    def left_open_by(self, tail: str) -> int | None:
        """Return the number of the region of text that `tail`, a prompt's end, opens with its last characters."""
        stripped = tail.rstrip()
        for number, one in enumerate(self.all):
            if one.region.kind in (TEXT, THINKING) and any(
                match.end() == len(stripped) for match in one.opening.finditer(stripped)
            ):
                return number
        return None

    def left_open_in(self, text: str) -> int | None:
        """Return the number of the region of text that `text`, the beginning of an answer, opens and does not close."""
        parser, number = RegionParser(self), None
        for part in parser.feed(text):
            if isinstance(part, Opened):
                number = next(index for index, one in enumerate(self.all) if one.region.kind == part.kind)
            elif isinstance(part, Closed):
                number = None
        return number


def _has_one(text: str, known: dict[str, bool], find: Callable[[str], bool]) -> bool:
    """Return whether `find` is true of a character of `text`. What was found is remembered in `known`."""
    for character in text:
        is_one = known.get(character)
        if is_one is None:
            is_one = find(character)
            if len(known) < _MOST_KNOWN:
                known[character] = is_one
        if is_one:
            return True
    return False


class RegionParser:
    """See `Parser`. `starts_in` is the number of the region that the prompt has opened.

    `tools`: those that may be called, by name; None: there are none, and calls are text. `is_continued`: the beginning
    of the answer is in the prompt.
    """

    def __init__(
        self,
        regions: Regions,
        *,
        starts_in: int | None = None,
        tools: Mapping[str, Tool] | None = None,
        is_continued: bool = False,
    ) -> None:
        self.num_calls = 0
        self._regions = regions
        self._tags = regions.tags
        self._watched = [one for one in regions.all if tools is not None or one.region.kind not in (TOOL_USE, CALLS)]
        self._tools = tools or {}
        self._held = ""  # not decided yet
        self._parts: list[Part] = []
        self._is_final = self._is_cut = False
        self._is_first = starts_in is None and not is_continued
        self._skips_space = starts_in is not None and not is_continued
        self._region: _Patterns | None = None
        # Of the call that is read: its opening, its text until its name is certain, and its reader.
        self._opening = self._source = ""
        self._is_started = False
        self._reader: CallReader | None = None
        self._captures: dict[str, str] = {}
        self._num_searched = 0  # characters of it that hold no closing
        if starts_in is not None:
            self._region = regions.all[starts_in]
            self._parts.append(Opened(self._region.region.kind))

    def passes(self, text: str) -> bool:
        """Return whether nothing is held, and no tag is or begins in the text."""
        if self._held or self._skips_space or self._is_first or self._parts or self._tags.shown(text) is not text:
            return False
        if self._region is None:
            return not self._regions.can_begin(text)
        if self._region.region.kind == TOOL_USE:
            return self._is_started and self._reader is not None and self._reader.passes(text)
        return not self._region.can_close(text)

    def feed(self, text: str) -> list[Part]:
        """Return what is certain now."""
        self._held += text
        while self._step():
            pass
        parts, self._parts = self._parts, []
        return parts

    def finish(self, *, is_cut: bool = False) -> list[Part]:
        """Return what is left: a tag that is not whole is text, and so is a call without a name.

        A call that is a name alone has no arguments, unless it `is_cut`.
        """
        self._is_final, self._is_cut = True, is_cut
        parts = self.feed("")
        while self._region is not None and self._region.region.kind == TOOL_USE and not self._is_started:
            if self._reader is not None and self._reader.is_named_alone:
                self._end_named_alone(self._reader)
                break
            self._give_up()
            parts += self.feed("")
        if (reader := self._reader) is not None and self._is_started:
            if not reader.is_whole and not reader.is_broken:
                reader.parts.append(reader.rest())
                self._pass_parts(reader)
            self.num_calls += reader.has_whole_arguments  # only its frame is cut off
        return [*parts, *self.feed("")]

    def _end_named_alone(self, reader: CallReader) -> None:
        """Open the call whose name is the end of the answer; without arguments unless they were to come."""
        if not self._is_cut:
            reader.end()
        self._start_call(reader.name or "")
        self._pass_parts(reader)

    def _step(self) -> bool:
        """Take what can be taken of the text that is held; return whether to look again."""
        if self._skips_space and self._held:
            stripped = self._held.lstrip()
            self._markup(len(self._held) - len(stripped))
            self._skips_space = not stripped
        if not self._held:
            return False
        if self._region is None:
            return self._step_outside()
        if self._region.region.read is not None:
            return self._step_to_calls(self._region, self._region.region.read)
        if self._region.region.kind == TOOL_USE:
            return self._step_in_call(self._region)
        return self._step_in_text(self._region)

    def _step_outside(self) -> bool:
        match, patterns = self._earliest()
        start = len(self._held) if match is None else match.start()
        if start:
            self._write(start)
        if match is None or patterns is None:
            return False
        grows = patterns.region.can_grow and match.end() - start == len(self._held) and not self._is_final
        if not match.partial and not grows:
            self._captures = {name: text for name, text in match.groupdict().items() if text is not None}
            self._open(patterns, match.end() - start, self._captures.get("name"))
            return True
        if len(self._held) > _MAX_OPENING:
            self._write(1)
            return True
        return False

    def _earliest(self) -> tuple[Any, _Patterns | None]:
        """Return the first opening in the held text, whole or the beginning of an opening at its end."""
        best, of = None, None
        if not self._is_first and not self._regions.can_begin(self._held):
            return best, of
        for patterns in self._watched:
            if patterns.region.is_first:
                match = patterns.opening.match(self._held, partial=not self._is_final) if self._is_first else None
            else:
                match = patterns.opening.search(self._held, partial=not self._is_final)
            if match is None or (match.partial and match.start() == len(self._held)):
                continue
            if best is None or (match.start(), not match.partial) < (best.start(), not best.partial):
                best, of = match, patterns
        return best, of

    def _write(self, num: int) -> None:
        """Pass the first `num` held characters on as text."""
        self._parts.append(Written(self._tags.shown(self._held[:num])))
        self._held = self._held[num:]
        self._is_first = False

    def _markup(self, num: int) -> None:
        """Take the first `num` held characters as markup."""
        if num:
            self._parts.append(Markup(self._tags.shown(self._held[:num])))
            self._held = self._held[num:]

    def _open(self, patterns: _Patterns, num: int, name: str | None) -> None:
        """Enter the region that the first `num` held characters open."""
        self._is_first = False
        if patterns.region.kind not in BLOCK_KINDS:
            self._markup(num)
            self._skips_space = True
            return
        self._region = patterns
        if patterns.region.read is not None:
            self._opening, self._source, self._is_started, self._reader = self._held[:num], "", False, None
            self._held, self._num_searched = self._held[num:], 0
        elif patterns.region.kind == TOOL_USE:
            self._begin_call(num, None if name is None else self._tags.shown(name).strip())
        else:
            self._parts.append(Opened(patterns.region.kind))
            self._markup(num)
            self._skips_space = True

    def _leave(self) -> None:
        self._region = None
        self._skips_space = True

    def _step_in_text(self, patterns: _Patterns) -> bool:
        match = patterns.closing.search(self._held, partial=not self._is_final)
        start = len(self._held) if match is None else match.start()
        if start:
            self._write(start)
        if match is None or match.partial:
            return False
        self._markup(match.end() - start)
        self._parts.append(Closed())
        self._leave()
        return True

    def _step_to_calls(self, patterns: _Patterns, read: Read) -> bool:
        """Read the calls of a region once its closing is there; at the end of the answer without it."""
        match = None if patterns.closing is None else patterns.closing.search(self._held, self._num_searched)
        if match is None and self._is_cut and patterns.closing is not None:
            match = patterns.closing.search(self._held + _MORE, self._num_searched)
            if match is None:
                return self._give_up()  # more of the calls was to come
        self._num_searched = max(0, len(self._held) - _MAX_CLOSING)
        if match is None and not self._is_final:
            return self._give_up() if len(self._held) > _MAX_WHOLE else False
        body = self._held if match is None else self._held[: match.start()]
        calls = read(self._tags.shown(body), self._captures, self._tools)
        if calls is None:
            return self._give_up()
        for call in calls:
            self._parts += (Opened(TOOL_USE, call.name), Made(call.arguments), Closed())
        self.num_calls += len(calls)
        self._held = self._opening + self._held
        self._markup(len(self._opening) + (len(body) if match is None else min(match.end(), len(self._held))))
        self._leave()
        return True

    def _begin_call(self, num: int, name: str | None) -> None:
        """Begin a call that the first `num` held characters open. They are kept until its name is certain."""
        self._opening, self._held = self._held[:num], self._held[num:]
        self._source, self._is_started = "", False
        self._reader = CallReader(name, is_bare=self._region is not None and self._region.region.is_first)

    def _step_in_call(self, patterns: _Patterns) -> bool:
        reader = self._reader
        assert reader is not None
        if reader.is_whole:
            return self._step_after_call(patterns)
        if reader.is_named_alone:
            self._take(reader.skip_space(self._held))
            if self._ends_without_arguments(reader, patterns):
                return False
        if not reader.is_whole:
            self._take(reader.feed(self._held, 0))
        if not self._is_started:
            name = self._tags.shown(reader.name or "")
            is_other = patterns.region.is_first and bool(name) and name not in self._tools
            is_open = not reader.is_certain or (patterns.region.is_first and not reader.has_own_arguments)
            if is_other or is_open:
                return self._give_up() if is_other or reader.is_broken or reader.is_whole else False
            self._start_call(name)
        self._pass_parts(reader)
        if reader.is_broken:
            self._region = None
        self._held, reader.unread = reader.unread + self._held, ""
        return reader.is_whole or reader.is_broken

    def _take(self, num: int) -> None:
        """Take the first `num` held characters for the reader; they are kept until the call's name is certain."""
        if not self._is_started:
            self._source += self._held[:num]
        self._held = self._held[num:]

    def _start_call(self, name: str) -> None:
        self._is_started = True
        self._parts.append(Opened(TOOL_USE, self._tags.shown(name)))
        if self._opening:
            self._parts.append(Markup(self._tags.shown(self._opening)))

    def _pass_parts(self, reader: CallReader) -> None:
        """Pass on what was read of a call that is open, and close it where it ends."""
        for part in reader.parts:
            self._parts.append(type(part)(self._tags.shown(part.text)))
        reader.parts.clear()
        if reader.is_whole or reader.is_broken:
            self._parts.append(Closed())
            self.num_calls += reader.is_whole
            reader.has_whole_arguments = False  # counted

    def _ends_without_arguments(self, reader: CallReader, patterns: _Patterns) -> bool:
        """Take a named call that its closing or another opening follows; return whether that is not decided yet."""
        is_undecided = False
        openings = (one.opening for one in self._watched if not one.region.is_first)
        for pattern in (patterns.closing, *openings) if self._held else ():
            match = None if pattern is None else pattern.match(self._held, partial=not self._is_final)
            if match is None:
                continue
            if not match.partial:
                reader.end()
                return False
            is_undecided = True
        return is_undecided and len(self._held) <= _MAX_OPENING

    def _step_after_call(self, patterns: _Patterns) -> bool:
        """Look for another call of the region, or for its closing; without either it is over."""
        is_undecided = False
        for pattern in (patterns.separator, patterns.closing):
            match = None if pattern is None else pattern.match(self._held, partial=not self._is_final)
            if match is None:
                continue
            if match.partial:
                is_undecided = True
            elif pattern is patterns.separator:
                self._begin_call(match.end(), None)
                return True
            else:
                self._markup(match.end())
                self._leave()
                return True
        if is_undecided:
            return False
        self._leave()
        return True

    def _give_up(self) -> bool:
        """Pass the opening of a call on as text, and look at what follows it again."""
        self._region = None
        opening, rest = self._opening, self._source + self._held
        self._held = opening
        if opening:
            self._write(len(opening))
        self._held = rest
        return True
