"""What a grammar costs: compiling it, the mask of a token, and a step of the demo model with it and without.

    python -m benchmarks.grammar [--rounds 7] [--only texts|model]

The masks are those of JSON records, token by token, for the demo model's 3,072 ids and for 151,000: these and random
words. Rounds are in turns; medians, wall time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence

from project.settings import HELPDESK
from streamserve.clients.factory import hf_client
from streamserve.clients.thread.client import ThreadClient
from streamserve.engine.config import EngineConfig, ModelConfig
from streamserve.engine.grammar.compiler import GrammarCompiler
from streamserve.engine.grammar.limits import GrammarLimits
from streamserve.engine.grammar.matcher import Matcher, TokenTable, Vocabulary, advance, set_masks
from streamserve.engine.grammar.source import source_of
from streamserve.engine.text.hf_tokenizer import HFTokenizer
from streamserve.protocol.events import Token
from streamserve.protocol.requests import GenerateRequest, Grammar, Message, SamplingParams

RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "kind": {"enum": ["person", "firm", "other"]},
    },
    "required": ["name", "age", "tags", "kind"],
}
TEXT = b'{"name":"Anna of the quiet river","age":31,"tags":["tea","boats and rain"],"kind":"person"}'
FIELDS = {f"q{j}": {"type": "string"} for j in range(20)}
WIDE = {"type": "object", "properties": {f"p{i}": {"type": "object", "properties": FIELDS} for i in range(40)}}
GRAMMARS = {
    "JSON object": Grammar(kind="json_object"),
    "record schema": Grammar(kind="json_schema", value=json.dumps(RECORD)),
    "schema of 800 fields": Grammar(kind="json_schema", value=json.dumps(WIDE)),
    "regex": Grammar(kind="regex", value="[a-z]{3,9}-[0-9]{4}"),
    "1,000 choices": Grammar(kind="choice", value=json.dumps([f"{i}-{i * 7919:x}" for i in range(1000)])),
}
LARGE_VOCABULARY = 151_000
NUM_STREAMS = (1, 8)
NUM_TOKENS = 48


class Padded(HFTokenizer):
    """The demo model's tokens, and random words up to the size of a large model's vocabulary."""

    def __init__(self, path: str, num_ids: int) -> None:
        super().__init__(path)
        rng = random.Random(1)
        missing = max(0, num_ids - len(self._bytes))
        self._bytes += [
            bytes(rng.choices(b"abcdefghijklmnopqrstuvwxyz ", k=rng.randint(7, 12))) for _ in range(missing)
        ]
        self.vocab_size = len(self._bytes)


def timed(times: list[float], start: float) -> None:
    times.append(time.perf_counter() - start)


def compile_times(tokenizer: HFTokenizer, rounds: int) -> None:
    """Print what each grammar takes: proved in a worker the first time, and compiled again for each answer."""
    limits = GrammarLimits(cache_bytes=0)  # nothing is remembered
    first = GrammarCompiler(tokenizer, tokenizer.vocab_size, (), limits)
    again = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    try:
        start = time.perf_counter()
        first.matchers(GRAMMARS["regex"], [()])
        print(f"  worker's start and both tables: {time.perf_counter() - start:.2f} s, once")
        for name, grammar in GRAMMARS.items():
            again.matchers(grammar, [()])
            proved: list[float] = []
            matcher: list[float] = []
            for _ in range(rounds):
                start = time.perf_counter()
                first.matchers(grammar, [()])
                timed(proved, start)
                start = time.perf_counter()
                again.matchers(grammar, [()])
                timed(matcher, start)
            print(f"  {name:22} first {_ms(proved)}   proved before {_ms(matcher)}")
    finally:
        first.close()
        again.close()


def mask_times(tokenizer: HFTokenizer, rounds: int) -> None:
    """Print what a step's masks and moves take for each sequence, one by one and by threads."""
    vocabulary = Vocabulary(TokenTable.of(tokenizer, tokenizer.vocab_size, ()), GrammarLimits())
    source = source_of(GRAMMARS["record schema"], GrammarLimits())
    ids = {tokenizer.token_bytes(one): one for one in reversed(range(tokenizer.vocab_size))}
    text = [ids[bytes([byte])] for byte in TEXT]
    for num in (1, 8, 16, 32):
        times: dict[str, list[float]] = {"one by one": [], "by threads": []}
        for _ in range(rounds):
            for how, seconds in times.items():
                vocabulary.least_parallel = 10**9 if how == "one by one" else 1
                matchers = [Matcher(vocabulary=vocabulary, inner=vocabulary.new_matcher(source)) for _ in range(num)]
                set_masks(matchers)
                for token_id in text:
                    start = time.perf_counter()
                    advance([(matcher, [token_id]) for matcher in matchers])
                    seconds.append((time.perf_counter() - start) / num)
        line = "   ".join(f"{how} {_us(found)}, slowest {1e6 * max(found):7.1f}" for how, found in times.items())
        print(f"  {num:3} sequences, a token: {line}")


async def decode_times(rounds: int) -> None:
    """Print what a token takes on the demo model with a grammar and without, in turns."""
    model = ModelConfig(alias="demo", path=str(HELPDESK), parity_probe=False)
    client = hf_client(model, EngineConfig(prefix_caching=False))
    client.start()
    while client.describe().state == "loading":  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    grammar = Grammar(kind="regex", value="(.|\n)*")
    try:
        for num in NUM_STREAMS:
            times: dict[str, list[float]] = {"free": [], "regex": [], "JSON": []}
            for _ in range(rounds + 1):
                for how, seconds in times.items():
                    chosen = {"regex": grammar, "JSON": GRAMMARS["JSON object"]}.get(how)
                    seconds.append(await _a_token(client, num, chosen))
            medians = {how: statistics.median(found[1:]) for how, found in times.items()}  # the first one warms up
            line = "   ".join(
                f"{how} {1e3 * one:6.2f} ms ({one / medians['free']:.2f})" for how, one in medians.items()
            )
            print(f"  {num} streams, a step: {line}")
    finally:
        await client.aclose()


async def _a_token(client: ThreadClient, num: int, grammar: Grammar | None) -> float:
    """Return the seconds of a step with `num` answers."""

    async def one(seed: int) -> int:
        sampling = SamplingParams(seed=seed, max_tokens=NUM_TOKENS, temperature=1.0, ignore_eos=True)
        chat = (Message(role="user", content="What does it cost?"),)
        request = GenerateRequest(model="demo", messages=chat, sampling=sampling, grammar=grammar)
        generation = await client.generate(request)
        return sum([len(event.token_ids) async for event in generation if isinstance(event, Token)])

    begun = client.stats().steps
    start = time.perf_counter()
    await asyncio.gather(*map(one, range(num)))
    return (time.perf_counter() - start) / (client.stats().steps - begun)


def _ms(times: Sequence[float]) -> str:
    return f"{1e3 * statistics.median(times):8.2f} ms"


def _us(times: Sequence[float]) -> str:
    return f"{1e6 * statistics.median(times):6.1f} µs"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", choices=("texts", "model"), help="grammars and masks, or steps of the demo model")
    asked = parser.parse_args()
    for num_ids in (0, LARGE_VOCABULARY) if asked.only != "model" else ():
        tokenizer = Padded(str(HELPDESK), num_ids)
        print(f"{tokenizer.vocab_size:,} ids")
        compile_times(tokenizer, asked.rounds)
        mask_times(tokenizer, asked.rounds)
    if asked.only != "texts":
        print("the demo model")
        asyncio.run(decode_times(asked.rounds))


if __name__ == "__main__":
    main()
