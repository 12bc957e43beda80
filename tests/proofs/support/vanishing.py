"""A program for a network of its own (`unshare -n`): a server, readers, and a firewall that loses their packets.

    python -m tests.proofs.support.vanishing flow|uvicorn      prints one JSON object: what became of each reader

A vanished reader sends nothing any more, neither FIN nor RST: packets are dropped both ways.
"""

from __future__ import annotations

import fcntl
import json
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tests.support.checks.stream_checks import check_native
from tests.support.servers.flow_driver import flow
from tests.support.servers.web_servers import Server, uvicorn, wait_until_ready

DEADLINE_SECONDS = 60.0
APP = "tests.support.apps.host_apps:starlette"
# uvicorn sets nothing: the system gives up after so many retransmissions (about 3 s).
RETRIES = Path("/proc/sys/net/ipv4/tcp_retries2")
_ESTABLISHED = "01"
_ASK = b"GET /ask?prompt=gone HTTP/1.1\r\nHost: localhost\r\n\r\n"
_CHAT = json.dumps({"prompt": "gone", "max_tokens": 400, "ignore_eos": True, "stream": True}).encode()
_POST = (
    b"POST /ai/v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(_CHAT), _CHAT)
)


def main(kind: str) -> None:
    bring_loopback_up()
    if kind == "uvicorn":
        RETRIES.write_text("3")
        with uvicorn(APP, "--no-access-log") as server:
            out = {"data under way": vanish(server, _ASK, "parked", num_steps=40)}
    else:
        with flow("--vanish-seconds", "1", app=APP) as server:
            out = {
                "data under way": vanish(server, _ASK, "parked", num_steps=40),
                "silence": vanish(server, _POST, "finished", num_steps=0),
            }
    print(json.dumps(out))


def vanish(server: Server, request: bytes, state: str, *, num_steps: int) -> dict[str, Any]:
    """Read an answer's beginning, vanish, let the engine run `num_steps` more; return what the server did.

    It waits until the answer is in `state`. An answer that is to be aborted has no generation while its end is being
    committed, which looks like "parked". The engine must have come to a stop as well: it may still run a plan that it
    made before the answer was taken from it.
    """
    wait_until_ready(f"{server.url}/ai")
    get(server, "/control?allow=3")
    reader = server.connect()
    reader.sendall(request)
    data = b""
    while b"token" not in data and b"content" not in data.partition(b"\r\n\r\n")[2]:
        data += reader.recv(65536)
    held = until(server, lambda state: state["is_holding"])
    (seq_id,) = held["plans"][-1]
    before = num_connections(server, reader)
    drop_packets_of(reader)
    if num_steps:
        get(server, f"/control?allow={num_steps}")
    number = len(held["streams"]) - 1
    seen = until(
        server,
        lambda now: now["streams"][number]["state"] == state and (now["is_holding"] or now["stats"]["running"] == 0),
    )
    get(server, "/control?open=1")
    until(server, lambda state: state["stats"]["blocks_used"] == 0)
    other = httpx.get(f"{server.url}/ask?prompt=here", timeout=DEADLINE_SECONDS, trust_env=False)
    after = until(server, lambda state: not any("delivery" in name for name in state["tasks"]))
    return {
        "state": seen["streams"][number]["state"],
        "steps_unread": len(seen["plans"]) - len(held["plans"]),
        "steps_for_others": len(after["plans"]) - len(seen["plans"]),
        "later_steps_of_it": sum(seq_id in plan for plan in after["plans"][len(seen["plans"]) :]),
        "left": {name: after["stats"][name] for name in ("running", "waiting", "blocks_used")},
        "connections": [before, num_connections(server, reader)],
        "next_reader": check_native(other.content)[-1].event,
    }


def drop_packets_of(client: socket.socket) -> None:
    """Drop all packets of this connection, both ways."""
    port = str(client.getsockname()[1])
    for side in ("--sport", "--dport"):
        subprocess.run(["iptables", "-A", "INPUT", "-p", "tcp", side, port, "-j", "DROP"], check=True)


def num_connections(server: Server, client: socket.socket) -> int:
    """Count the server's sockets of that connection, as the kernel reports them."""
    wanted = (server.port, client.getsockname()[1])
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ports = [tuple(int(end.partition(":")[2], 16) for end in row[1:3]) for row in rows if row[3] == _ESTABLISHED]
    return ports.count(wanted)


def get(server: Server, path: str) -> dict[str, Any]:
    value = httpx.get(server.url + path, timeout=DEADLINE_SECONDS, trust_env=False).raise_for_status().json()
    assert isinstance(value, dict)
    return value


def until(server: Server, claim: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Query the state until `claim` holds for it."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not claim(state := get(server, "/state")):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{state | {'plans': state['plans'][-9:]}}\n{server.output()}")
        time.sleep(0.02)
    return state


def bring_loopback_up() -> None:
    """Do what `ip link set lo up` does (netdevice(7)): a new network has it down."""
    get_flags, set_flags, up = 0x8913, 0x8914, 1
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        row = fcntl.ioctl(any_socket, get_flags, struct.pack("16sH14x", b"lo", 0))
        (flags,) = struct.unpack_from("H", row, 16)
        fcntl.ioctl(any_socket, set_flags, struct.pack("16sH14x", b"lo", flags | up))


if __name__ == "__main__":
    main(sys.argv[1])
