"""`read_text`: the text of an attached file, by the ending of its name; what cannot be read is refused in words.

Text is UTF-8, or UTF-16 and UTF-32 with their mark at the beginning. A PDF's text layer is read by pypdf, in a process
with bounds of its own (pdf_reader.py). Blocks: call it on a thread.
"""

from __future__ import annotations

import codecs
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from streamserve.api.logs import get_logger
from streamserve.protocol.errors import BadRequest, TooLarge, UnsupportedMedia
from streamserve.protocol.limits import Limits

log = get_logger(__name__)

PDF = "application/pdf"
TYPES = {
    ".txt": "text/plain",
    ".md": "text/markdown",
    ".markdown": "text/markdown",
    ".csv": "text/csv",
    ".pdf": PDF,
}
SECONDS, MEMORY_BYTES = 30, 512 * 1024 * 1024  # of the process that reads a PDF

_MARKS = (  # the longer marks first: UTF-32's little end begins as UTF-16's
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_MOST_BYTES_OF_A_CHAR = 4
_NOT_TEXT = re.compile(r"[\x00-\x08\x0b\x0e-\x1f\x7f]")
_PAGE_BREAK = re.compile(r"\f+")
_LINE_BREAK = re.compile(r"\r\n?")

_INSTALL = 'pip install "streamserve[pdf]"'
_PROBLEMS = {
    "encrypted": ("encrypted_file", "The PDF is locked by a password. Save it without the password, and attach that."),
    "broken": ("broken_file", "The PDF cannot be read: it is damaged, or no PDF. Save it anew, and attach that."),
    "complex": ("file_too_complex", "The PDF takes too long, or too much memory, to read. Attach a part of it."),
}


def kinds() -> list[str]:
    """Return the endings of the files that can be attached here."""
    return [ending for ending, kind in TYPES.items() if kind != PDF or find_spec("pypdf") is not None]


def type_of(name: str) -> str:
    """Return the type of a file by its name. Raises UnsupportedMedia."""
    ending = os.path.splitext(name)[1].lower()
    if ending not in TYPES:
        message = (
            f"Files of the kind {ending[:16] or 'without an ending'!r} cannot be attached: {', '.join(TYPES)} can."
        )
        raise UnsupportedMedia(message, code="unsupported_file", param="file")
    if TYPES[ending] == PDF and find_spec("pypdf") is None:
        message = f"This server reads no PDFs: it lacks pypdf. Its operator can install it: {_INSTALL}."
        raise BadRequest(message, code="pdf_unavailable", param="file")
    return TYPES[ending]


def read_text(file: IO[bytes], num_bytes: int, content_type: str, limits: Limits) -> str:
    """Return the text of a file. Raises TooLarge, BadRequest."""
    text = _of_pdf(file, limits) if content_type == PDF else _of_text(file, num_bytes, limits)
    text = _LINE_BREAK.sub("\n", _PAGE_BREAK.sub("\n\n", text))
    text = _NOT_TEXT.sub("", text).encode("utf-8", "replace").decode().strip()
    if not text:
        what = "The PDF has no text: its pages are pictures. Attach a file whose text can be selected."
        message = what if content_type == PDF else "The file has no text."
        raise BadRequest(message, code="file_without_text", param="file")
    if len(text) > limits.max_attachment_chars:
        raise _too_long(limits)
    return text


def _of_text(file: IO[bytes], num_bytes: int, limits: Limits) -> str:
    """Return the decoded text; a file that must be too long is not read."""
    if num_bytes > _MOST_BYTES_OF_A_CHAR * (limits.max_attachment_chars + 1):
        raise _too_long(limits)
    data = file.read()
    encoding = next((name for mark, name in _MARKS if data.startswith(mark)), "utf-8")
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        message = f"The file is not text in UTF-8 (at byte {error.start}). Save it as UTF-8, and attach that."
        raise BadRequest(message, code="wrong_encoding", param="file") from None
    if "\0" in text:
        message = "The file is not text: it has bytes that are zero. Save it as text in UTF-8, and attach that."
        raise BadRequest(message, code="wrong_encoding", param="file")
    return text


def _of_pdf(file: IO[bytes], limits: Limits) -> str:
    """Return the text layer, as a process of its own reads it."""
    bounds = (limits.max_pdf_pages, limits.max_attachment_chars, MEMORY_BYTES, SECONDS)
    command = [sys.executable, "-I", str(Path(__file__).with_name("pdf_reader.py")), *map(str, bounds)]
    file.seek(0)
    try:
        done = subprocess.run(command, stdin=file, capture_output=True, timeout=SECONDS, check=False)
        found = json.loads(done.stdout) if done.returncode == 0 else {"problem": "complex"}  # killed by a bound
    except subprocess.TimeoutExpired:
        found = {"problem": "complex"}
    except ValueError:
        log.exception("pdf_reader_failed", status=done.returncode, said=done.stderr[-500:].decode(errors="replace"))
        found = {"problem": "broken"}
    problem = found.get("problem", "")
    if problem == "pages":
        message = f"The PDF has more than {limits.max_pdf_pages:,} pages. Attach a part of it."
        raise TooLarge(message, code="text_too_long", param="file")
    if problem == "chars":
        raise _too_long(limits)
    if problem:
        code, message = _PROBLEMS[problem]
        raise BadRequest(message, code=code, param="file")
    return str(found["text"])


def _too_long(limits: Limits) -> TooLarge:
    message = f"The file has more than {limits.max_attachment_chars:,} characters of text. Attach a part of it."
    return TooLarge(message, code="text_too_long", param="file")
