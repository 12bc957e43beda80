"""Laws of the detokenizer: what is shown is the text, never half a code point, and never part of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.engine.echo import EOS, VOCAB_SIZE, EchoTokenizer
from streamserve.engine.text.tokenizer import ByteDetokenizer, StopStrings, WindowDetokenizer, make_detokenizer

ECHO = EchoTokenizer()
TEXTS = ["naïve café", "静かな河 🙂🦊", "👩‍🚀👨‍👩‍👧‍👦", "क्षत्रिय", "a\ufffdb\ufffd", "\ud7ff\ue000\U0010ffff"]


def feed_all(ids: Sequence[int]) -> list[str]:
    """The text after each token, and what the flush gives."""
    detokenizer = ByteDetokenizer(ECHO)
    return [*map(detokenizer.feed, ids), detokenizer.flush()]


def text_of(ids: Sequence[int]) -> str:
    return decoded(b"".join(ECHO.token_bytes(token_id) for token_id in ids if not ECHO.is_special(token_id)))


def decoded(data: bytes) -> str:
    """Without a possible beginning of a code point."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data)


@given(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=60))
def test_random_ids(ids: list[int]) -> None:
    """Whatever the tokens are, the shown text is their bytes, decoded."""
    assert "".join(feed_all(ids)) == text_of(ids)


@given(st.binary(max_size=200))
def test_random_bytes(data: bytes) -> None:
    """Whatever the bytes, valid or not."""
    assert "".join(feed_all(list(data))) == decoded(data)


@pytest.mark.parametrize("text", TEXTS)
def test_whole_code_points_only(text: str) -> None:
    """Fed byte by byte, each code point is shown at its last byte, whole; also a real U+FFFD."""
    shown = feed_all(list(text.encode()))
    assert [piece for piece in shown if piece] == list(text)


def test_half_a_code_point_at_the_end_is_no_text() -> None:
    """An answer that max_tokens cuts within an emoji ends before it."""
    assert feed_all(list("a🙂".encode()[:4])) == ["a", "", "", "", ""]


def test_special_tokens_are_skipped() -> None:
    """They do not even break a code point in two."""
    first, second = "é".encode()
    assert "".join(feed_all([first, EOS, second])) == "é"


@pytest.mark.parametrize("byte", [0x80, 0xE4, 0xF0, 0xFF])
def test_bytes_that_never_become_valid(byte: int) -> None:
    """At most three bytes are pending, so a long run of nonsense comes out as it goes in."""
    shown = feed_all([byte] * 5000)
    assert "".join(shown) == "\ufffd" * (5000 if byte in (0x80, 0xFF) else 4999)  # 0xE4 and 0xF0 may begin one
    assert all(len(piece) <= 1 for piece in shown)


@pytest.mark.parametrize(("strip", "text"), [(True, "road and"), (False, " road and")])
def test_leading_space(strip: bool, text: str) -> None:
    """A chat answer loses the space that SentencePiece-like tokenizers put first; a completion keeps it."""
    ids = [find(b" road"), find(b" and")]
    detokenizer = make_detokenizer(ECHO, strip_leading_space=strip)
    assert "".join(map(detokenizer.feed, ids)) == text


def find(data: bytes) -> int:
    return next(token_id for token_id in range(VOCAB_SIZE) if ECHO.token_bytes(token_id) == data)


class CountingTokenizer(EchoTokenizer):
    """Has no exact bytes, and records how much is decoded at once."""

    is_byte_exact = False

    def __init__(self) -> None:
        self.longest = 0

    def decode(self, token_ids: Sequence[int]) -> str:
        self.longest = max(self.longest, len(token_ids))
        return super().decode(token_ids)


@given(st.text(max_size=40))
def test_window_decoder_shows_the_text(text: str) -> None:
    """The decoder for exotic tokenizers shows valid text exactly."""
    data = text.encode("utf-8", "ignore")
    detokenizer = make_detokenizer(CountingTokenizer(), strip_leading_space=False)
    assert isinstance(detokenizer, WindowDetokenizer)
    shown = "".join(map(detokenizer.feed, data)) + detokenizer.flush()
    assert shown == data.decode().rstrip("\ufffd")


def test_window_decoder_is_bounded() -> None:
    """On bytes that never become valid it decodes a bounded window per token, and shows something."""
    tokenizer = CountingTokenizer()
    detokenizer = WindowDetokenizer(tokenizer)
    shown = "".join(detokenizer.feed(0xFF) for _ in range(2000)) + detokenizer.flush()
    assert shown == "\ufffd" * 2000
    assert tokenizer.longest <= 32


def watch(stop: Sequence[str], pieces: Sequence[str]) -> tuple[list[str], bool]:
    """The text shown after each piece (and at the end), and whether a stop string was found."""
    strings = StopStrings(stop)
    shown = []
    for piece in pieces:
        shown.append(strings.feed(piece))
        if strings.is_found:
            return shown, True
    return [*shown, strings.flush()], False


def test_only_a_possible_beginning_is_held_back() -> None:
    """Text that cannot become a stop string is shown at once; what might is held until it is decided."""
    assert watch(["END"], ["abc", "E", "x", "EN", "EN", "D"]) == (["abc", "", "Ex", "", "EN", ""], True)


def test_held_text_is_flushed() -> None:
    """If the answer ends first, the held text is shown."""
    assert watch(["END"], ["abE"]) == (["ab", "E"], False)


def test_nothing_behind_a_stop_string_is_shown() -> None:
    """The stop string and what follows it in the same piece are dropped."""
    assert watch(["\n\n"], ["one\n\ntwo"]) == (["one"], True)


def test_the_first_complete_stop_wins() -> None:
    """Of several in one piece, the one complete first; at the same place the longest."""
    assert watch(["cde", "bc"], ["abcdef"]) == (["a"], True)
    assert watch(["c", "abc"], ["xabcd"]) == (["x"], True)


def test_overlapping_beginnings() -> None:
    """A false start that contains a true one is not missed."""
    assert watch(["aab"], list("aaab")) == (["", "", "a", ""], True)


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.text("abc", max_size=4), max_size=20),
)
def test_pieces_do_not_matter(stop: list[str], pieces: list[str]) -> None:
    """However the text is cut, the same is shown in all: up to the stop string that is complete first."""
    text = "".join(pieces)
    ends = [(end, end - len(s)) for end in range(len(text) + 1) for s in stop if text[:end].endswith(s)]
    expected = text[: min(ends)[1]] if ends else text
    shown, is_found = watch(stop, pieces)
    assert ("".join(shown), is_found) == (expected, bool(ends))


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.text("abc", max_size=4), max_size=20),
)
def test_held_back_is_the_least_possible(stop: list[str], pieces: list[str]) -> None:
    """After each piece, what is hidden is the beginning of a stop string, and no longer hidden text is one."""
    strings, seen, shown = StopStrings(stop), "", ""
    for piece in pieces:
        seen += piece
        shown += strings.feed(piece)
        if strings.is_found:
            return
        held = seen[len(shown) :]
        assert not held or any(one.startswith(held) for one in stop)
        longest = max(n for n in range(len(seen) + 1) for one in stop if one[:-1].startswith(seen[len(seen) - n :]))
        assert len(held) == longest
