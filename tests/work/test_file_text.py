"""The text of attached files: what is read, and what is refused in words. PDFs are hostile."""

from __future__ import annotations

import io
import tempfile
from dataclasses import replace

import pytest

from streamserve.protocol.errors import BadRequest, StreamserveError, TooLarge, UnsupportedMedia
from streamserve.protocol.limits import Limits
from streamserve.work import file_text
from streamserve.work.file_text import read_text, type_of
from tests.support.bodies.pdfs import hostile, locked, pdf

LIMITS = Limits()


def text_of(name: str, content: bytes, limits: Limits = LIMITS) -> str:
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.seek(0)
        return read_text(file, len(content), type_of(name), limits)


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("a.txt", b"One\r\ntwo\rthree\n", "One\ntwo\nthree"),
        ("A.MD", "# Größe".encode(), "# Größe"),
        ("b.csv", b"\xef\xbb\xbfa,b\n1,2\n", "a,b\n1,2"),
        ("c.txt", "Größe".encode("utf-16"), "Größe"),
        ("d.txt", b"\xfe\xff" + "Größe".encode("utf-16-be"), "Größe"),
        ("e.txt", "Größe".encode("utf-32"), "Größe"),
        ("f.txt", b"page\x0cpage\x07", "page\n\npage"),
        ("g.pdf", pdf("The first page", "(The) second\nof two lines"), "The first page\n\n(The) second\nof two lines"),
        ("h.pdf", locked("", "Open to all"), "Open to all"),
    ],
)
def test_text_is_read(name: str, content: bytes, text: str) -> None:
    """In its encoding, with one kind of line break, and without control characters."""
    assert text_of(name, content) == text


@pytest.mark.parametrize(
    ("name", "content", "code", "words"),
    [
        ("a.txt", "Größe".encode("latin-1"), "wrong_encoding", "UTF-8"),
        ("a.txt", "Größe".encode("utf-16-le"), "wrong_encoding", "UTF-8"),
        ("a.csv", b"a,b\n\0\0\0\n", "wrong_encoding", "zero"),
        ("a.md", b" \n\t\n", "file_without_text", "no text"),
        ("a.pdf", pdf(""), "file_without_text", "pictures"),
        ("a.pdf", locked("let me in"), "encrypted_file", "password"),
        ("a.pdf", b"Hello", "broken_file", "damaged"),
    ],
)
def test_what_cannot_be_read_is_refused_in_words(name: str, content: bytes, code: str, words: str) -> None:
    """A code for programs, and the way out for people."""
    with pytest.raises(BadRequest, match=words) as refused:
        text_of(name, content)
    assert (refused.value.code, refused.value.param) == (code, "file")


@pytest.mark.parametrize("name", ["a.docx", "a", "a.pdf.exe", "pdf", ".txt.", "x." + "y" * 300])
def test_other_kinds_of_files_are_named(name: str) -> None:
    """With the kinds that are read."""
    with pytest.raises(UnsupportedMedia, match=r"\.txt, \.md") as refused:
        type_of(name)
    assert len(refused.value.message) < 200


@pytest.mark.parametrize("content", [pdf("word " * 30), b"word " * 30, b"word " * 3_000_000])
def test_a_text_over_the_limit_is_refused(content: bytes) -> None:
    """A large file is not even read."""
    with pytest.raises(TooLarge, match="100 characters"):
        text_of("a.pdf" if content[:1] == b"%" else "a.txt", content, replace(LIMITS, max_attachment_chars=100))


def test_too_many_pages_are_refused() -> None:
    """The bound is named."""
    with pytest.raises(TooLarge, match="2 pages"):
        text_of("a.pdf", pdf("a", "b", "c"), replace(LIMITS, max_pdf_pages=2))


@pytest.mark.parametrize("kind", hostile())
def test_a_hostile_pdf_is_an_error_of_its_own(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is in it: text, or a refusal; its reader's process has bounds, and is not ours."""
    monkeypatch.setattr(file_text, "SECONDS", 10)
    code = ""
    try:
        assert len(text_of("a.pdf", hostile()[kind])) <= LIMITS.max_attachment_chars
    except StreamserveError as error:
        code = error.code
    assert code in {"", "broken_file", "file_too_complex", "file_without_text", "text_too_long"}


def test_a_reader_that_takes_too_long_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The upload ends; so does the process."""
    monkeypatch.setattr(file_text, "SECONDS", 1)
    with pytest.raises(BadRequest) as refused:
        text_of(
            "a.pdf", pdf(*["word " * 200] * 3_000), replace(LIMITS, max_pdf_pages=10_000, max_attachment_chars=10**9)
        )
    assert refused.value.code == "file_too_complex"


def test_without_pypdf_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra by which an operator installs it; text files are read all the same."""
    monkeypatch.setattr(file_text, "find_spec", lambda name: None)
    with pytest.raises(BadRequest, match=r"streamserve\[pdf\]") as refused:
        type_of("a.pdf")
    assert refused.value.code == "pdf_unavailable"
    assert read_text(io.BytesIO(b"Hello"), 5, type_of("a.txt"), LIMITS) == "Hello"
