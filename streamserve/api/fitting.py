"""`fit`: keep of a question's files what its model has room for, as `run.trim` does: whole pieces from the front.

What is kept is decided when the question is asked, and written into it: later turns have the same words. asyncio.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

from streamserve.clients.base import EngineClient, until_loaded
from streamserve.clients.pipeline.client import PipelineClient
from streamserve.clients.pipeline.run import estimate
from streamserve.protocol.attached import cut, files_of, kept_of, piece_ends
from streamserve.protocol.errors import BadRequest, Refused
from streamserve.protocol.events import Status
from streamserve.protocol.requests import Admission, GenerateRequest, Message, Question

# Of a model's context: left for the answer, where the request does not say how much; and for what a pipeline adds.
_FOR_THE_ANSWER, _FOR_THE_PIPELINE = 4, 2


async def fit(
    client: EngineClient, request: GenerateRequest, admission: Admission, *, loading_seconds: float, most_chars: int
) -> tuple[GenerateRequest, Admission]:
    """Return the request with what fits of a new question's files, and the admission that says what was left out.

    `most_chars`: of all messages together, also where only the model's server knows how long its prompts may be.
    """
    last, turn = request.messages[-1] if request.messages else None, admission.turn
    question = None if turn is None else turn.question
    if turn is None or question is None or last is None or not last.attached:
        return request, admission
    ends = [piece_ends(file.text) for file in files_of(last)]
    num_pieces = sum(map(len, ends))
    num_kept = _num_within(ends, most_chars - _num_other_chars(request, last))
    await until_loaded(client, loading_seconds)
    room = room_of(client, request)

    async def num_tokens(num_kept: int) -> int:
        asked = _with_last(request, cut(last, kept_of(ends, num_kept)))
        return await num_tokens_of(client, asked, admission)

    num = await num_tokens(num_kept) if room else 0
    without = await num_tokens(0) if num > room else 0
    while num_kept and num > room:
        # As many as fit if all are alike, but one less at least.
        share = max(0, room - without) / max(1, num - without)
        num_kept = min(num_kept - 1, int(num_kept * share))
        num = await num_tokens(num_kept)
    if num_kept == num_pieces:
        return request, admission
    kept = kept_of(ends, num_kept)
    num_chars, of_chars = sum(kept), sum(len(file.text) for file in files_of(last))
    bound = f"{room:,} tokens" if room else f"{most_chars:,} characters"
    message = f"The attached text was cut to {num_chars:,} of {of_chars:,} characters ({bound} in all)."
    if admission.trimmed is not None and admission.trimmed.message:  # of the conversation's history
        message = f"{admission.trimmed.message} {message}"
    trimmed = Status(status="trimmed", step=num_kept, of=num_pieces, message=message)
    turn = replace(turn, question=replace(question, content=_with_kept(question, kept)))
    return _with_last(request, cut(last, kept)), replace(admission, turn=turn, trimmed=trimmed)


def _num_other_chars(request: GenerateRequest, last: Message) -> int:
    return len(last.words) + sum(len(message.content) for message in (request.messages or ())[:-1])


def _num_within(ends: Sequence[Sequence[int]], most_chars: int) -> int:
    """Return how many of the first pieces have at most so many characters."""
    num = 0
    for of_file in ends:
        num_here = bisect_right(of_file, most_chars)
        num += num_here
        if num_here < len(of_file):
            break
        most_chars -= of_file[-1] if of_file else 0
    return num


def _with_kept(question: Question, kept: Sequence[int]) -> str:
    """Return the JSON of a question with how many characters of each of its files its prompt has."""
    by_id = dict(zip(question.attachment_ids, kept, strict=True))
    return json.dumps({**json.loads(question.content), "kept": by_id}, ensure_ascii=False)


def _with_last(request: GenerateRequest, message: Message) -> GenerateRequest:
    return replace(request, messages=(*(request.messages or ())[:-1], message))


def room_of(client: EngineClient, request: GenerateRequest) -> int:
    """Return how many tokens the prompt may have, 0 where that is not known."""
    length, most = client.describe().max_model_len, request.sampling.max_tokens
    if isinstance(client, PipelineClient):
        return length // _FOR_THE_PIPELINE
    return length - (length // _FOR_THE_ANSWER if most is None else min(most, length - 1))


async def num_tokens_of(client: EngineClient, request: GenerateRequest, admission: Admission) -> int:
    """Return how many tokens the prompt has; an estimate where its server does not count, or has no place now."""
    try:
        return len(await client.tokenize(request, admission))
    except Refused:
        pass
    except BadRequest as error:
        if error.code != "unsupported_parameter":
            raise
    return sum(estimate(message.content) for message in request.messages or ())
