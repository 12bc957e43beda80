"""A process that begins and ends answers of many callers, all at once, in the rows alone: no engine, no log.

`python -m tests.proofs.support.counted_program NUM_CALLERS` until it is killed; with 0, it ends the answers that others
have left. Settings: tests/support/sites/counted_site.py.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import sys

import django

django.setup()

from django.db import IntegrityError  # noqa: E402

from streamserve.api.usage import Used  # noqa: E402
from streamserve.models import Stream  # noqa: E402
from streamserve.protocol.errors import DatabaseUnavailable  # noqa: E402
from streamserve.protocol.rates import RateLimited  # noqa: E402
from streamserve.protocol.requests import Admission  # noqa: E402
from streamserve.rows import orm, rates, usage  # noqa: E402
from streamserve.rows.receivers import finish_stream, insert_stream  # noqa: E402

PROMPT, ANSWER = 5, 20  # tokens that an answer holds
NUM_KEYS = 40  # that requests are sent again with, whichever process is asked


def a_caller(chance: random.Random) -> Admission:
    """Return a user, a key of a user's, a member of a team, or a visitor; of each kind two ask most of the time."""
    number = chance.choice((0, 1, chance.randrange(2, 100)))
    kind = chance.randrange(4)
    if kind == 0:
        return Admission(owner=f"user:{number}", tenant=f"user:{number}")
    if kind == 1:
        return Admission(owner=f"key:{number}", tenant=f"user:{number // 2}")
    if kind == 2:
        return Admission(owner=f"user:m{number}", tenant=f"user:m{number}", counted_as=f"team:{number % 5}")
    return Admission(owner=f"anon:{number}", tenant=f"anon:{number}", counted_as=f"anon:@{number % 3}/{number}")


async def call(chance: random.Random) -> None:
    """Begin and end answers of one caller after the other."""
    while True:
        admission = a_caller(chance)
        row = Stream(
            id=secrets.token_hex(16),
            log_id=secrets.token_hex(6),
            owner=admission.owner,
            tenant=admission.tenant,
            model="echo",
            request_key=f"sent {chance.randrange(NUM_KEYS)}" if chance.random() < 0.1 else None,
        )
        ask = rates.Ask(admission, lambda: rates.Needs(prompt=PROMPT, answer=ANSWER))
        try:
            await insert_stream(row, ask=ask)
        except (RateLimited, IntegrityError, DatabaseUnavailable):  # the last: of a machine that is too busy
            continue
        await end(row, chance.randrange(ANSWER))


async def end(row: Stream, num_tokens: int) -> None:
    """End an answer that has used so many tokens."""
    used = usage.Entry(
        whose=usage.Whose(owner=row.owner, tenant=row.tenant),
        model=row.model,
        kind="answer",
        used=Used(requests=1, prompt_tokens=PROMPT, completion_tokens=num_tokens),
    )
    await orm.insist(
        finish_stream,
        row.pk,
        num_tokens=PROMPT + num_tokens,
        used=used,
        prompt_tokens=PROMPT,
        completion_tokens=num_tokens,
    )


async def main(num_callers: int) -> None:
    """Call, or end what is left."""
    chance = random.Random()
    if num_callers:
        await asyncio.gather(*(call(chance) for _ in range(num_callers)))
    left = await orm.read(lambda: list(Stream.objects.filter(state="running")))
    await asyncio.gather(*(end(row, 0) for row in left))
    orm.close()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
