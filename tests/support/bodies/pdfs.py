"""PDFs made by hand (ISO 32000-2, 7.5), whole and hostile."""

from __future__ import annotations

import io
import zlib
from collections.abc import Mapping, Sequence
from functools import cache

_HEAD = b"%PDF-1.7\n"


def pdf(*pages: str) -> bytes:
    """Return a PDF with a text of so many pages; a page of "" has a picture of nothing."""
    objects = [b"<</Type/Catalog/Pages 2 0 R>>", b"", b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>"]
    kids = []
    for text in pages:
        lines = text.replace("\\", "\\\\").replace("(", "\\(").replace(")", "\\)").split("\n")
        shown = " T* ".join(f"({line}) Tj" for line in lines)
        content = f"BT /F1 12 Tf 14 TL 50 700 Td {shown} ET".encode("latin-1") if text else b"0 0 9 9 re f"
        objects.append(stream(content))
        number = len(objects)
        kids.append(f"{number + 1} 0 R")
        objects.append(
            b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]/Resources<</Font<</F1 3 0 R>>>>/Contents %d 0 R>>"
            % number
        )
    objects[1] = f"<</Type/Pages/Kids[{' '.join(kids)}]/Count {len(pages)}>>".encode()
    return whole(objects)


def stream(content: bytes, entries: bytes = b"") -> bytes:
    """Return a stream object."""
    return b"<</Length %d%s>>stream\n%s\nendstream" % (len(content), entries, content)


def whole(objects: Sequence[bytes], trailer: bytes = b"") -> bytes:
    """Return a file of these objects, the first of which is the catalog."""
    out, offsets = bytearray(_HEAD), []
    for number, body in enumerate(objects, 1):
        offsets.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    at = len(out)
    out += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    for offset in offsets:
        out += b"%010d 00000 n \n" % offset
    out += b"trailer\n<</Size %d/Root 1 0 R%s>>\nstartxref\n%d\n%%%%EOF\n" % (len(objects) + 1, trailer, at)
    return bytes(out)


def locked(password: str, text: str = "Secret") -> bytes:
    """Return a PDF that opens by this password."""
    from pypdf import PdfReader, PdfWriter

    writer = PdfWriter(clone_from=PdfReader(io.BytesIO(pdf(text))))
    writer.encrypt(user_password=password, owner_password="owner", algorithm="AES-256")
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()


def _page_with(content: bytes, entries: bytes = b"") -> bytes:
    return whole(
        [
            b"<</Type/Catalog/Pages 2 0 R>>",
            b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
            b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 9 9]/Resources<</XObject<</A 4 0 R>>>>/Contents 4 0 R>>",
            stream(content, entries),
        ]
    )


def _bomb() -> bytes:
    return zlib.compress(zlib.compress(bytes(100_000_000), 1), 1)


@cache
def hostile() -> Mapping[str, bytes]:
    """Return PDFs that are meant to break their reader, by what is wrong with them."""
    nested = b"[" * 200_000
    return {
        "no PDF": b"Dear all,\nthis is no PDF.\n" * 9,
        "cut off": pdf("Hello")[:200],
        "empty of objects": _HEAD + b"%%EOF",
        "pages that are their own parents": whole(
            [b"<</Type/Catalog/Pages 2 0 R>>", b"<</Type/Pages/Kids[2 0 R 2 0 R]/Count 2>>"]
        ),
        "a catalog that is its own pages": whole([b"<</Type/Catalog/Pages 1 0 R/Kids[1 0 R]/Count 9999999>>"]),
        "more pages than it has": pdf("Hello").replace(b"/Count 1", b"/Count 999999999"),
        "nested without end": _page_with(nested),
        "an object nested without end": whole([b"<</Type/Catalog/Pages " + nested + b">>"]),
        "a stream that is packed twice": _page_with(_bomb(), b"/Filter[/FlateDecode/FlateDecode]"),
        "a form that draws itself": _page_with(b"/A Do " * 1000, b"/Type/XObject/Subtype/Form"),
        "a table that points at itself": pdf("Hello").replace(b"/Root 1 0 R", b"/Root 1 0 R/Prev 9"),
        "a length of a number without end": pdf("Hello").replace(b"/Length ", b"/Length " + b"9" * 5000),
        "noise": _HEAD + bytes(range(256)) * 400 + b"%%EOF",
    }
