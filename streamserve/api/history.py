"""`shorten`: leave the oldest turns of a conversation out of a prompt that is longer than its model takes.

    system │ q a q a q a q a │ q        whole turns go, the system prompt and the newest question stay
           └─ left out ─┘

They go in jumps of about a quarter of what is kept: the prompts of the turns between two jumps begin alike, so that the
engine finds them in its prefix cache. (A window that moves with every turn would miss it at every turn.) asyncio.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

from streamserve.api.fitting import num_tokens_of, room_of
from streamserve.clients.base import EngineClient, until_loaded
from streamserve.protocol.attached import cut
from streamserve.protocol.events import Status
from streamserve.protocol.requests import SYSTEM_ROLES, Admission, GenerateRequest, Message

_STEPS = 4  # a step is so many times fewer characters than the room has tokens
_BYTES_AROUND = 32  # of a message: what its template adds, as tokens


async def shorten(
    client: EngineClient, request: GenerateRequest, admission: Admission, *, loading_seconds: float
) -> tuple[GenerateRequest, Admission]:
    """Return the request with as much of its history as fits, and the admission that says what was left out.

    Files of the newest question do not count: they are fitted afterwards. What does not fit even so stays as it is, and
    is refused by the engine.
    """
    messages = request.messages or ()
    system = list(takewhile(lambda message: message.role in SYSTEM_ROLES, messages))
    turns = messages[len(system) :]
    newest = max((index for index, turn in enumerate(turns) if turn.role == "user"), default=0)
    if not newest:
        return request, admission
    await until_loaded(client, loading_seconds)
    room = room_of(client, request)
    counted = tuple(_without_files(turn) if index == newest else turn for index, turn in enumerate(turns))
    if not room or _most_tokens((*system, *counted)) <= room:
        return request, admission

    async def num_tokens(first: int) -> int:
        return await num_tokens_of(client, replace(request, messages=(*system, *counted[first:])), admission)

    num_in_all = await num_tokens(0)
    if num_in_all <= room:
        return request, admission
    sizes, are_questions = [len(turn.content) for turn in counted], [turn.role == "user" for turn in turns]

    def first_after(num_steps: int) -> int:
        return min(newest, _first_after(num_steps * step, sizes, are_questions))

    async def fits(num_steps: int) -> bool:
        return await num_tokens(first_after(num_steps)) <= room

    # The least number of steps that fits grows with the conversation, and so does its multiple. It is looked for from
    # where it would be if all messages had as many characters for a token.
    step, num_chars = max(1, room // _STEPS), sum(sizes)
    num = max(1, int(num_chars * (1 - room / num_in_all)) // step)
    while num > 1 and await fits(num - 1):
        num -= 1
    while not await fits(num):
        if first_after(num) == newest:
            return request, admission
        num += 1
    several = 1
    while 8 * several * step <= num_chars - num * step:
        several *= 2
    return _without(request, admission, len(system), first_after(-(-num // several) * several))


def _first_after(num_chars: int, sizes: Sequence[int], are_questions: Sequence[bool]) -> int:
    """Return the first question that has at least so many characters before it."""
    left_out = 0
    for index, size in enumerate(sizes):
        if left_out >= num_chars and are_questions[index]:
            return index
        left_out += size
    return len(sizes)


def _without_files(message: Message) -> Message:
    return cut(message, [0] * len(message.attached)) if message.attached else message


def _most_tokens(messages: Sequence[Message]) -> int:
    """Return how many tokens messages have at most: no token is less than a byte."""
    return sum(len(message.content.encode("utf-8", "replace")) + _BYTES_AROUND for message in messages)


def _without(
    request: GenerateRequest, admission: Admission, num_system: int, num_out: int
) -> tuple[GenerateRequest, Admission]:
    """Return the request without the first turns of its history, and the admission that says so."""
    messages = request.messages or ()
    kept = (*messages[:num_system], *messages[num_system + num_out :])
    num = len(messages) - num_system
    said = f"The conversation is longer than the model takes: the first {num_out} of its {num} messages were left out."
    trimmed = Status(status="trimmed", step=num - num_out, of=num, message=said)
    return replace(request, messages=kept), replace(admission, trimmed=trimmed)


def first_kept(num_chars: Sequence[int], are_questions: Sequence[bool], *, most_chars: int, most_messages: int) -> int:
    """Return the first message of a branch that its prompt has, so that it has at most so many characters and messages.

    Whole turns are left out, in jumps of a quarter of the bound.
    """
    cut_messages, cut_chars = _jumps(len(num_chars), most_messages), _jumps(sum(num_chars), most_chars)
    first = left_out = 0
    while first < len(num_chars) - 1 and (first < cut_messages or left_out < cut_chars or not are_questions[first]):
        left_out += num_chars[first]
        first += 1
    return first


def _jumps(num: int, most: int) -> int:
    """Return how much to leave out of `num`, in whole jumps, so that at most `most` stay."""
    jump = max(1, most // 4)
    return -(-max(0, num - most) // jump) * jump
