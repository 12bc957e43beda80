"""What blocks cost: the text side of a token, as plain text and in blocks, in turns on one thread.

    python -m benchmarks.blocks

Each answer goes through a `Choice` token by token, as in the engine's client. Its tokenizer has one token for each word
and each tag, so that the detokenizer's share is small and the same for all.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

from streamserve.engine.echo import EchoTokenizer
from streamserve.engine.output import SequenceUpdate
from streamserve.engine.text.choice import Choice
from streamserve.engine.text.formats.base import AnswerSource
from streamserve.engine.text.formats.markup import choose_format
from streamserve.engine.text.tokenizer import Prompt
from streamserve.protocol.requests import GenerateRequest, Message, SamplingParams, Tool

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
WORD = " river"
NUM_WORDS = 400
ROUNDS = 15
THOUGHT = ["<think>", "\n", *[WORD] * NUM_WORDS, "\n", "</think>", "\n\n", *[WORD] * NUM_WORDS]
CALL = ["<tool_call>", '\n{"name": "f", "arguments": {"text": "', *[WORD] * NUM_WORDS, '"}}\n', "</tool_call>"]
TEXT = [WORD] * NUM_WORDS


class WordTokenizer(EchoTokenizer):
    """One token for each piece of the answers."""

    def __init__(self) -> None:
        pieces = list(dict.fromkeys([*TAGS, *THOUGHT, *CALL]))
        self.ids = {piece: index for index, piece in enumerate(pieces)}
        self._data = [piece.encode() for piece in pieces]
        self.vocab_size = len(pieces)

    def token_bytes(self, token_id: int) -> bytes:
        return self._data[token_id]

    def is_special(self, token_id: int) -> bool:
        return False

    def tag_id(self, text: str) -> int | None:
        return self.ids[text] if text in TAGS else None


def seconds(make: Callable[[], Choice], token_ids: Sequence[int]) -> float:
    """Return the seconds that an answer takes."""
    choice = make()
    updates = [SequenceUpdate(seq_id=1, at=0.0, token_ids=(token_id,)) for token_id in token_ids]
    start = time.perf_counter()
    for update in updates:
        choice.push(update)
    return time.perf_counter() - start


def main() -> None:
    tokenizer = WordTokenizer()
    sampling = SamplingParams(seed=1)
    format_ = choose_format(tokenizer, "qwen3")
    request = GenerateRequest(model="m", messages=(Message(role="user", content="?"),), tools=(Tool(name="f"),))
    prompt = Prompt(token_ids=(tokenizer.ids[WORD],))

    def make_parser() -> object:
        return format_.parser(request, prompt)

    source = AnswerSource(tags=format_.tags, make_parser=make_parser, answer="a")  # type: ignore[arg-type]

    def plain() -> Choice:
        return Choice(tokenizer, sampling)

    def blocks() -> Choice:
        return Choice(tokenizer, sampling, source=source)

    cases = {
        "plain text": (plain, TEXT),
        "text of a model with a format": (blocks, TEXT),
        "a thought, then text": (blocks, THOUGHT),
        "a call": (blocks, CALL),
    }
    taken: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(ROUNDS):
        for name, (make, pieces) in cases.items():
            ids = [tokenizer.ids[piece] for piece in pieces]
            taken[name].append(seconds(make, ids) / len(ids))
    base = statistics.median(taken["plain text"])
    for name, times in taken.items():
        median = statistics.median(times)
        print(f"{name:32} {1e6 * median:6.2f} µs a token   {median / base:5.2f} × plain")


if __name__ == "__main__":
    main()
