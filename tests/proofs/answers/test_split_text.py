"""Emoji and CJK, split over tokens by the engine and over reads by the client: no event holds half a code point."""

from __future__ import annotations

import socket
from urllib.parse import urlencode

from streamserve.engine.echo import VOCAB_SIZE, EchoTokenizer
from tests.proofs.support.users import Site
from tests.support.checks.stream_checks import check_native, check_tokens, text_of
from tests.support.servers.flow_driver import chunks

# The echo engine has two tokens for each of these.
SPLIT = "🙂🌊🦊河静éन🌱"
ASK = {"prompt": "数える 🎉", "max_tokens": 400, "ignore_eos": "true", "seed": 3}


def read_bytes(site: Site, **query: str) -> bytes:
    """Request an answer and read it a byte at a time; return its body."""
    data = bytearray()
    with socket.create_connection(("127.0.0.1", site.server.port), timeout=60) as client:
        lines = [f"GET /streams/new?{urlencode({**ASK, **query})} HTTP/1.1", "Host: 127.0.0.1", "Connection: close"]
        lines += [f"Cookie: sessionid={site.sessions[0]}", "Sec-Fetch-Site: same-origin", "", ""]
        client.sendall("\r\n".join(lines).encode())
        while piece := client.recv(1):
            data += piece
    body, is_whole = chunks(bytes(data))
    assert is_whole
    return body


def test_the_engine_does_split_them() -> None:
    """Without this the test below proves nothing: most of these characters come as two tokens that are no text."""
    pieces = [EchoTokenizer().token_bytes(token_id) for token_id in range(VOCAB_SIZE)]
    halves = [piece for piece in pieces if len(piece) > 1 and "\ufffd" in piece.decode(errors="replace")]
    assert len(halves) >= len(SPLIT)


def test_every_event_holds_whole_code_points(site: Site) -> None:
    """In each format; the text is the same in all, and each of its pieces is text by itself."""
    frames = check_native(read_bytes(site))
    text = text_of(frames)
    num_split = sum(text.count(character) for character in SPLIT)
    pieces = [frame.json["text"] for frame in frames if frame.event == "token"]
    assert num_split >= 20
    assert not any("\ufffd" in piece for piece in pieces)
    assert [piece.encode().decode() for piece in pieces] == pieces
    assert check_tokens(read_bytes(site, format="tokens")) == text
    assert read_bytes(site, format="text").decode() == text
    print(f"\n{len(text)} characters, {num_split} of them split over tokens, read byte by byte in three formats")
