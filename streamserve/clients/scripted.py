"""`ScriptedRunner` and `ScriptedTokenizer`: the echo engine with answers that people can read.

    answers = {"price": "It costs 3 euros."}     a question that has the word "price" gets that answer
    answers = {}                                 any other question is the answer itself

An answer is given byte by byte and then ends; where the end is banned (`ignore_eos`), the words of the echo engine
follow. The runner keeps the tokens of each slot beside the echo engine's hashes, so that a sequence continues after a
park, a preemption or a cached prefix as in a real model. No torch, no clock, no randomness.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from typing import Any

from streamserve.engine.echo import ASSISTANT, END_OF_TURN, USER, EchoRunner, EchoTokenizer, is_allowed
from streamserve.engine.plan import Chunk, Sampled, SampleSpec
from streamserve.engine.text.tokenizer import Prompt
from streamserve.protocol.requests import GenerateRequest

_NUM_BYTES = 256


class ScriptedTokenizer(EchoTokenizer):
    """Every prompt ends with the token after which the answer begins."""

    def encode(self, request: GenerateRequest) -> Prompt:
        prompt = super().encode(request)
        is_chat = request.messages is not None
        return prompt if is_chat else Prompt(token_ids=(*prompt.token_ids, ASSISTANT))


class ScriptedRunner(EchoRunner):
    """Answers with what `answer` returns for the last question of the prompt."""

    def __init__(self, answer: Callable[[str], str], **options: Any) -> None:
        super().__init__(**options)
        self._answer = answer
        self._ids = array("i", [0]) * (self.num_blocks * self.block_size)  # by slot

    def _write(self, chunk: Chunk) -> None:
        super()._write(chunk)
        for position, token_id in enumerate(chunk.token_ids, chunk.start):
            self._ids[self._slot(chunk, position)] = token_id

    def _sample(self, chunk: Chunk, spec: SampleSpec) -> Sampled:
        num_tokens = chunk.start + len(chunk.token_ids)
        ids = [self._ids[self._slot(chunk, position)] for position in range(num_tokens)]
        begin = _last(ids, ASSISTANT) + 1
        answer = self._answer(_text(ids[_last(ids[: begin - 1], USER) + 1 : begin - 1])).encode()
        num_given = num_tokens - begin
        token_id = answer[num_given] if num_given < len(answer) else END_OF_TURN
        is_over = num_given > len(answer)
        if is_over or token_id in spec.banned_token_ids or not is_allowed(token_id, spec):
            return super()._sample(chunk, spec)
        return Sampled(seq_id=chunk.seq_id, token_id=token_id)

    def _slot(self, chunk: Chunk, position: int) -> int:
        return chunk.block_table[position // self.block_size] * self.block_size + position % self.block_size


def answering(answers: Mapping[str, str]) -> Callable[[str], str]:
    """Return the function from a question to its answer: of the first entry whose word it has, else the question."""

    def answer(question: str) -> str:
        found = (text for word, text in answers.items() if word.lower() in question.lower())
        return next(found, question)

    return answer


def _last(ids: list[int], token_id: int) -> int:
    """Return the last position of `token_id`; -1 for none, so that what follows it is everything."""
    return next((position for position in reversed(range(len(ids))) if ids[position] == token_id), -1)


def _text(ids: list[int]) -> str:
    return bytes(one for one in ids if one < _NUM_BYTES).decode(errors="replace")
