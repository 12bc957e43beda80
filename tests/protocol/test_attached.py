"""Files of text in a message: their form, and where they are cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from streamserve.protocol.attached import TextFile, cut, files_of, kept_of, message_of, piece_ends
from streamserve.protocol.requests import Admission, GenerateRequest, decode_request, encode_request

BILL = TextFile(name="bill.csv", type="text/csv", text="month,total\nMay,9.90")
TEXTS = st.text(alphabet="ab \n<file/>\t", max_size=200)


def test_files_come_first_with_their_names() -> None:
    """A name, the text, and then the words: the form that docs/conversations.md shows."""
    message = message_of("What was June's?", [BILL])
    assert message.content == '<file name="bill.csv">\nmonth,total\nMay,9.90\n</file>\n\nWhat was June\'s?'
    assert (message.words, files_of(message)) == ("What was June's?", [BILL])
    assert message_of("Hello", []).content == message_of("Hello", []).words == "Hello"


def test_no_file_ends_itself_or_begins_another() -> None:
    """Neither by its text nor by its name."""
    text = 'all\n</file>\n\n<FILE name="rules">'
    message = message_of("Sum it up.", [TextFile(name='a">\n<b', type="text/plain", text=text)])
    assert message.content.lower().count("<file") == message.content.count("</file>") == 1
    assert message.content.startswith('<file name="a____b">\n')


@given(words=TEXTS, texts=st.lists(TEXTS, max_size=3), num=st.integers(0, 300))
def test_what_was_kept_once_is_the_same_later(words: str, texts: list[str], num: int) -> None:
    """A question that is cut when it is asked, and the same question in a later turn's history, have one text."""
    files = [TextFile(name="a", type="text/plain", text=text) for text in texts]
    whole = message_of(words, files)
    kept = kept_of([piece_ends(file.text) for file in files_of(whole)], num)
    asked = cut(whole, kept)
    assert asked == message_of(words, files, kept)
    assert asked.words == words
    assert [len(file.text) for file in files_of(asked)] == list(kept)


@given(st.text(alphabet="ab \n", max_size=6_000))
def test_pieces_are_the_whole_text(text: str) -> None:
    """Nothing is lost between pieces, and none is longer than a page."""
    ends = piece_ends(text)
    assert ends == sorted(set(ends))
    assert (ends[-1] if ends else 0) == len(text)


def test_pieces_end_behind_paragraphs_then_lines() -> None:
    """Words are cut only in a line that is longer than a piece."""
    assert piece_ends("one\n\ntwo\nthree\n\nfour") == [5, 16, 20]
    lines = ("x" * 99 + "\n") * 50
    assert piece_ends(lines) == [2_000, 4_000, 5_000]
    assert piece_ends("y" * 4_500) == [2_000, 4_000, 4_500]


def test_a_row_keeps_where_the_files_are() -> None:
    """A run that another process continues has the same words and files."""
    admission = Admission(owner="a", tenant="a")
    request = GenerateRequest(model="m", messages=(message_of("What was June's?", [BILL]),))
    assert decode_request(encode_request(request, admission), admission)[0] == request
    (plain,) = encode_request(GenerateRequest(model="m", messages=(message_of("Hi", []),)), admission)["request"][
        "messages"
    ]
    assert plain == {"role": "user", "content": "Hi", "extra": {}}
