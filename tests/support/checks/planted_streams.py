"""Hand-made streams, right and wrong, and a server that answers with them."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import httpx

LOG_ID = "abcdefghijkl"


def native(seq: int, event: str, data: str = "{}") -> bytes:
    return f"event: {event}\nid: {LOG_ID}-{seq}\ndata: {data}\n\n".encode()


def tokens(seq: int, data: str) -> bytes:
    return f"id: {LOG_ID}-{seq}\ndata: {data}\n\n".encode()


def durable(seq: int, event: str, data: str = "{}") -> bytes:
    """An item, and the offset behind it."""
    item = f'{{"seq":{seq},"type":"{event}","data":{data}}}'
    rest = '"upToDate":true,"streamClosed":true' if event == "done" else '"streamCursor":"7"'
    control = f'{{"streamNextOffset":"{LOG_ID}-{seq}",{rest}}}'
    return f"event: data\ndata:[{item}]\n\nevent: control\ndata:{control}\n\n".encode()


TOKEN = '{"text":"x","token_ids":[1],"choice":0}'
OK, META, DONE = b": ok\n\n", native(1, "meta"), native(3, "done")
GOOD = OK + META + native(2, "token", TOKEN) + DONE


@contextlib.contextmanager
def answering(body: bytes, *, starts_at: int = 1, is_chunked: bool = True, is_cut: bool = False) -> Iterator[int]:
    """Answer any request on a port with that body, byte for byte; twice on a reused connection."""
    head = f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nX-Stream-Id: {'f' * 32}\r\n"
    head += f"Streamserve-From: {starts_at}\r\n"
    whole = (head + "Connection: close\r\n\r\n").encode() + body
    if is_chunked:
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:9], body[9:]) if part)
        whole = (head + "Transfer-Encoding: chunked\r\n\r\n").encode() + chunks + (b"" if is_cut else b"0\r\n\r\n")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=_answer, args=(listener, whole))
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def _answer(listener: socket.socket, whole: bytes) -> None:
    with contextlib.suppress(OSError):
        while True:
            connection, _ = listener.accept()
            with connection:
                while b"\r\n\r\n" in connection.recv(65536):
                    connection.sendall(whole)
                    if not whole.endswith(b"0\r\n\r\n"):
                        break


def by_httpx(port: int) -> None:
    httpx.get(f"http://127.0.0.1:{port}/", trust_env=False)
