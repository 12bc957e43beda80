"""The text of a PDF, read by pypdf in a process of its own: a PDF may be made to take all memory, or for ever.

    python -I pdf_reader.py MOST_PAGES MOST_CHARS MOST_BYTES MOST_SECONDS < file.pdf

It prints {"text": …} or {"problem": …} as JSON. It is run by its path, and imports nothing of streamserve or the site.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
from typing import BinaryIO


def main() -> None:
    """Read standard input within the bounds of the arguments."""
    most_pages, most_chars, most_bytes, most_seconds = map(int, sys.argv[1:])
    bounds = {
        resource.RLIMIT_AS: most_bytes,
        resource.RLIMIT_CPU: most_seconds,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
    }
    for kind, most in bounds.items():
        with contextlib.suppress(ValueError, OSError):  # a system without this bound, or with a lower one
            resource.setrlimit(kind, (most, most))
    try:
        found = text_of(sys.stdin.buffer, most_pages, most_chars)
    except (MemoryError, RecursionError):
        found = {"problem": "complex"}
    except Exception:  # whatever a broken file makes of the parser
        found = {"problem": "broken"}
    sys.stdout.write(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # nothing else is to be written, and no object of the file needs to be freed


def text_of(file: BinaryIO, most_pages: int, most_chars: int) -> dict[str, str]:
    """Return the text, its pages parted by empty lines, or what is wrong with the file."""
    from pypdf import PdfReader

    reader = PdfReader(file)
    if reader.is_encrypted and not _is_opened(reader):
        return {"problem": "encrypted"}
    if len(reader.pages) > most_pages:
        return {"problem": "pages"}
    pages, num_chars = list[str](), 0
    for page in reader.pages:
        text = page.extract_text().strip()
        num_chars += len(text) + 2
        if num_chars > most_chars + 2:
            return {"problem": "chars"}
        if text:
            pages.append(text)
    return {"text": "\n\n".join(pages)}


def _is_opened(reader: object) -> bool:
    """Return whether the file opens without a password: many are locked against changes only."""
    try:
        return bool(reader.decrypt(""))  # type: ignore[attr-defined]
    except Exception:  # a cipher that is not there
        return False


if __name__ == "__main__":
    main()
