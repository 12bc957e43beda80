"""`EchoRunner` and `EchoTokenizer`: an engine without a model. It ships, so that a site's tests need no weights.

The runner keeps a "KV cache" in which each token's entry depends on all tokens before it, as in a real model. For
each new token it reads the whole sequence back through the block table and hashes it: a wrong block, slot, position,
order or cached block changes the text. The answer is readable nonsense, the same for the same prompt and seed. No
torch, no clock, no randomness.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from types import MappingProxyType
from typing import Any

from streamserve.engine.kv.groups import ONE_GROUP, Windows
from streamserve.engine.plan import (
    PENDING,
    Chunk,
    RawLogprobs,
    Sampled,
    SampleSpec,
    ScoreSpec,
    StepPlan,
    StepResult,
    TokenRules,
)
from streamserve.engine.text.tokenizer import Prompt, checked_bytes, checked_ids, checked_kwargs
from streamserve.protocol.requests import GenerateRequest

_WORD_LIST = (
    "a about above across after again air all almost along also always and answer any around as at autumn away "
    "back be because bell below between bird blue boat book both branch bread bridge bright bring brook but by "
    "call came can candle change child clear cloud cold colour come corner could country day deep did door down "
    "dream each early earth east echo end enough evening ever every eye fall far farm feel few field find fire "
    "first fish five flower follow food for forest found four fox from garden gave gentle get glass go gold good "
    "grass great green grew half hand harbour head hear heart help here high hill home hour house how if in into "
    "is island it just keep kind know lake lamp land last late leaf learn leave left letter life light like line "
    "listen little long look made make many map may meadow might mile moon more morning most mountain move much "
    "music must name near never new next night no north not note now of off often old on once one only open or "
    "orchard other our out over own page paper part path place plain play pond quiet rain read reach rest right "
    "river road rock room root run sail same sand saw say sea season seed seem set seven shade she shore should "
    "show side silver sky slow small snow so some song soon sound south spring star start stay still stone stood "
    "story stream street summer sun take talk tell than that the their them then there these they thing think "
    "this three through time to today together told took town trail tree true turn two under until up use valley "
    "very voice wait walk wall warm was watch water wave way we well went were west what wheel when where which "
    "while white who why wide wild will wind window winter with wood word work world would year yellow yes yet "
    "you young "
)
_WORDS = _WORD_LIST.split()
# Tokens that split code points, as byte-level BPE does: each opening is followed by its own ending.
_SPLIT = [
    (character.encode()[:cut], character.encode()[cut:])
    for character, cut in (("🙂", 1), ("🌊", 2), ("🦊", 3), ("河", 1), ("静", 2), ("é", 1), ("न", 2), ("🌱", 2))
]
_SPLIT = [(b" " + opening, ending) for opening, ending in _SPLIT]
_PUNCTUATION = [b",", b".", b".\n", b" -", b"?", b"!"]

EOS, SYSTEM, USER, ASSISTANT, END_OF_TURN = range(256, 261)
_FIRST_PIECE = 261
_PIECES: list[bytes] = [
    *(b" " + word.encode() for word in _WORDS),
    *_PUNCTUATION,
    *(piece for pair in _SPLIT for piece in pair),
]
VOCAB_SIZE = _FIRST_PIECE + len(_PIECES)
_FIRST_SPLIT = VOCAB_SIZE - 2 * len(_SPLIT)
_ROLES = {"system": SYSTEM, "developer": SYSTEM, "user": USER, "assistant": ASSISTANT}
_CLOSING = b'"}],'  # what ends a text, an object, a list, a value
# Candidates per position; enough for top-20 log-probabilities.
_NUM_CANDIDATES = 24
_NUM_DRAWS = 32  # some are drawn twice
# What poisoned or never written memory reads as; no token is written as this.
_POISON = -1
_MAX_SLOT = 2**63 - 1
_MIX = 6364136223846793005  # Knuth's multiplier for 64-bit sequences


class EchoRunner:
    """Implements `Runner` on lists of ints. `pause` is called once per step (a delay, for demonstrations).

    Top-k, the seed, rules and masks are honoured; top-p, min-p and penalties change nothing here. It takes a second
    plan before the first is collected, as a GPU does; `can_overlap`: whether the core does so by default, though it
    gains nothing.
    """

    vocab_size = VOCAB_SIZE
    windows: Windows = ONE_GROUP

    def __init__(
        self,
        *,
        num_blocks: int = 1024,
        block_size: int = 32,
        pause: Callable[[], None] | None = None,
        can_overlap: bool = False,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.can_overlap = can_overlap
        self._pause = pause
        self._slots = array("q", [_POISON]) * (num_blocks * block_size)
        self._last_token_ids: dict[int, int] = {}  # by sequence: what the last launched step gave

    def launch(self, plan: StepPlan) -> StepResult:
        """Write every chunk's tokens, then read every sampled sequence back. Nothing later changes the result."""
        chunks = [
            # The token of the step before, which the plan did not know yet.
            replace(chunk, token_ids=(self._last_token_ids[chunk.seq_id],)) if chunk.token_ids == (PENDING,) else chunk
            for chunk in plan.chunks
        ]
        for chunk in chunks:
            self._write(chunk)
        sampled = tuple(self._sample(chunk) for chunk in chunks if chunk.samples)
        self._last_token_ids = {one.seq_id: one.token_ids[-1] for one in sampled if one.token_ids}
        scores = {chunk.seq_id: self._score(chunk, chunk.scores) for chunk in chunks if chunk.scores is not None}
        return StepResult(step_id=plan.step_id, sampled=sampled, scores=scores)

    def collect(self, handle: object) -> StepResult:
        """Hand out what `launch` made, after the pause."""
        assert isinstance(handle, StepResult)
        if self._pause is not None:
            self._pause()
        return handle

    def close(self) -> None:
        """Free the slots."""
        self._slots = array("q")

    def poison(self, block_id: int) -> None:
        """Overwrite a block: a sequence that still reads it gets another text (pass as the core's `on_evict`)."""
        start = block_id * self.block_size
        self._slots[start : start + self.block_size] = array("q", [_POISON]) * self.block_size

    def _write(self, chunk: Chunk) -> None:
        """Write for each token what its K/V are in a real model: a function of it and of everything before it."""
        table, size = chunk.block_table, self.block_size
        # Slot of position i = table[i // size] * size + i % size.
        last = chunk.start - 1
        first = zlib.crc32(chunk.adapter.encode())  # 0 without
        before = self._slots[table[last // size] * size + last % size] if chunk.start else first
        for position, token_id in enumerate(chunk.token_ids, chunk.start):
            before = (before * _MIX + (position << 32 | token_id)) & _MAX_SLOT
            self._slots[table[position // size] * size + position % size] = before

    def _score(self, chunk: Chunk, spec: ScoreSpec) -> tuple[RawLogprobs, ...]:
        """Return log-probabilities of known tokens, by what the slot before each holds of all that precedes it.

        A token that is no candidate is less likely than all candidates.
        """
        out = []
        for position, token_id in enumerate(spec.token_ids, spec.first):
            slot = chunk.block_table[position // self.block_size] * self.block_size + position % self.block_size
            state = hashlib.sha256(self._slots[slot].to_bytes(8, "big", signed=True)).digest()
            scores = _scores(state, chunk.token_ids[position - chunk.start], frozenset())
            scores.setdefault(token_id, min(scores.values()) - 1.0)
            found = _logprobs(scores, token_id, spec.num_top)
            assert found is not None
            out.append(found)
        return tuple(out)

    def _read(self, chunk: Chunk) -> bytes:
        """Return what the sequence's slots hold, from position 0 to the end of the chunk."""
        out, num_tokens = bytearray(), chunk.start + len(chunk.token_ids)
        for index, block_id in enumerate(chunk.block_table):
            start = block_id * self.block_size
            num_here = max(0, min(self.block_size, num_tokens - index * self.block_size))
            out += self._slots[start : start + num_here].tobytes()
        return bytes(out)

    def _sample(self, chunk: Chunk) -> Sampled:
        """Draw after each sampled row, and keep what follows from known tokens."""
        num_known = len(chunk.token_ids) - len(chunk.proposed_ids)
        drawn = [
            self._draw(replace(chunk, token_ids=chunk.token_ids[: num_known + row]), spec)
            for row, spec in enumerate(chunk.samples)
        ]
        kept = chunk.kept(token_id for token_id, _ in drawn)
        logprobs = tuple(logprobs for _, logprobs in drawn[: len(kept)])
        return Sampled(seq_id=chunk.seq_id, token_ids=kept, logprobs=logprobs)

    def _draw(self, chunk: Chunk, spec: SampleSpec) -> tuple[int, RawLogprobs | None]:
        """Return the token after a chunk's last token, and its log-probabilities if they were asked for."""
        state = hashlib.sha256(self._read(chunk)).digest()
        banned = frozenset(spec.banned_token_ids)
        avoided = banned | _bad_ids(chunk, spec)
        if spec.mask is None:
            scores = _scores(state, chunk.token_ids[-1], avoided)
        else:
            scores = _allowed_scores(state, spec, avoided)
        if spec.rules is not None:
            scores = _ruled(scores, spec, banned, avoided)
        token_id = _choose(scores, spec)
        return token_id, _logprobs(scores, token_id, spec.sampling.logprobs)


def _scores(state: bytes, last_token_id: int, banned: frozenset[int]) -> dict[int, float]:
    """Return a few candidate tokens with falling logits: a fake distribution, whole in itself.

    After the opening half of a code point comes its ending. A sentence ends about every eighth token.
    """
    is_opening = last_token_id >= _FIRST_SPLIT and (last_token_id - _FIRST_SPLIT) % 2 == 0
    if is_opening and last_token_id + 1 not in banned:
        return {last_token_id + 1: 0.0}
    drawn = array("Q", hashlib.shake_256(state).digest(8 * _NUM_DRAWS))
    candidates = list(dict.fromkeys(token for token in map(_candidate, drawn) if token not in banned))
    if not candidates:
        candidates = [token for token in range(_FIRST_PIECE, VOCAB_SIZE) if token not in banned]
    return {token_id: -0.5 * rank for rank, token_id in enumerate(candidates[:_NUM_CANDIDATES])}


def _allowed_scores(state: bytes, spec: SampleSpec, avoided: frozenset[int]) -> dict[int, float]:
    """Return candidates among what a grammar allows.

    Mostly words, where these are allowed. Every fourth time the ends of an answer and what closes or parts values come
    first, so that no text is endless.
    """
    allowed = {token_id for token_id in range(VOCAB_SIZE) if is_allowed(token_id, spec)}
    allowed = allowed.difference(avoided) or allowed  # a ban never leaves nothing
    drawn = list(map(_candidate, array("Q", hashlib.shake_256(state).digest(8 * _NUM_DRAWS))))
    closing = [*spec.mask_end_ids, *_CLOSING]
    first = [*closing, *drawn] if state[0] % 4 == 0 else [*drawn, *closing]
    rest = sorted(allowed, key=lambda token_id: (token_id * _MIX + state[1]) & _MAX_SLOT)
    candidates = [token_id for token_id in dict.fromkeys([*first, *rest]) if token_id in allowed]
    return {token_id: -0.5 * rank for rank, token_id in enumerate(candidates[:_NUM_CANDIDATES])}


def is_allowed(token_id: int, spec: SampleSpec) -> bool:
    """Whether a grammar allows a token; without a grammar every token is allowed."""
    if spec.mask is None or token_id in spec.mask_end_ids:
        return True
    return bool(spec.mask[token_id // 8] >> token_id % 8 & 1)


def _bad_ids(chunk: Chunk, spec: SampleSpec) -> frozenset[int]:
    """Return the tokens that would complete a bad word."""
    if spec.rules is None:
        return frozenset()
    newest = chunk.token_ids[-1]
    return frozenset(spec.rules.bad_token_ids()) | {last for before, last in spec.bad_endings if before == newest}


def _ruled(
    scores: dict[int, float], spec: SampleSpec, banned: frozenset[int], avoided: frozenset[int]
) -> dict[int, float]:
    """Return the candidates within the allowed ids, with their biases, likeliest first. A bias makes a candidate.

    What only bad words avoid is a candidate where nothing else is allowed.
    """
    rules = spec.rules or TokenRules()
    lowest = min(scores.values()) - 1.0
    possible = [token_id for token_id in rules.allowed_token_ids if token_id not in banned]
    allowed = [token_id for token_id in possible if token_id not in avoided] or possible
    if allowed:
        scores = {token_id: scores.get(token_id, lowest) for token_id in allowed}
    for token_id, bias in rules.logit_bias:
        may_come = not (allowed or token_id in avoided) and is_allowed(token_id, spec)
        if token_id in scores or may_come:
            scores[token_id] = scores.get(token_id, lowest) + bias
    return dict(sorted(scores.items(), key=lambda pair: -pair[1]))


def _candidate(draw: int) -> int:
    kind, draw = draw % 32, draw // 32
    if kind < 4:
        return _FIRST_PIECE + len(_WORDS) + draw % len(_PUNCTUATION)
    if kind < 7:
        return _FIRST_SPLIT + 2 * (draw % len(_SPLIT))
    return _FIRST_PIECE + draw % len(_WORDS)


def _choose(scores: dict[int, float], spec: SampleSpec) -> int:
    """Return the likeliest, or `argmax(logit / temperature + Gumbel(seed, position, token))` among the top-k."""
    candidates = list(scores)[: spec.sampling.top_k or None]
    if spec.sampling.temperature == 0:
        return candidates[0]
    return max(candidates, key=lambda token_id: scores[token_id] / spec.sampling.temperature + _gumbel(spec, token_id))


def _gumbel(spec: SampleSpec, token_id: int) -> float:
    digest = hashlib.sha256(f"{spec.sampling.seed} {spec.position} {token_id}".encode()).digest()
    uniform = (int.from_bytes(digest[:8], "big") + 0.5) / 2**64
    return -math.log(-math.log(uniform))


def _logprobs(scores: dict[int, float], chosen: int, num_top: int | None) -> RawLogprobs | None:
    if num_top is None:
        return None
    total = math.log(sum(math.exp(score) for score in scores.values()))
    ranked = [(token_id, score - total) for token_id, score in scores.items()]
    return RawLogprobs(chosen=scores[chosen] - total, top=tuple(ranked[:num_top]))


class EchoTokenizer:
    """Bytes, five special tokens, a few hundred words, and halves of code points. Encoding is by bytes only."""

    vocab_size = VOCAB_SIZE
    eos_token_ids = frozenset({EOS, END_OF_TURN})
    has_chat_template = True
    chat_template = ""
    response_template: dict[str, Any] | None = None
    added_ids: Mapping[str, int] = MappingProxyType({})
    is_byte_exact = True
    strips_leading_space = True

    def encode(self, request: GenerateRequest) -> Prompt:
        """Return the prompt's ids. The chat template: role, content, end of turn; then the assistant's turn begins."""
        if request.messages is not None:
            checked_kwargs(request, frozenset())
            turns = [
                (_ROLES.get(message.role, USER), *checked_bytes(message.content), END_OF_TURN)
                for message in request.messages
            ]
            chat = tuple(chain.from_iterable(turns))
            # A turn to be continued is not closed, and no other begins.
            return Prompt(token_ids=chat[:-1] if request.continue_final_message else (*chat, ASSISTANT))
        ids = request.prompt_token_ids
        if ids is None:
            ids = tuple(checked_bytes(request.prompt or ""))
        return Prompt(token_ids=checked_ids(ids, self.vocab_size))

    def text_ids(self, text: str) -> tuple[int, ...]:
        """Return a word's own token, or the text's bytes."""
        data = text.encode()
        return (_FIRST_PIECE + _PIECES.index(data),) if data in _PIECES else tuple(data)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes a token stands for."""
        if 0 <= token_id < 256:
            return bytes([token_id])
        return _PIECES[token_id - _FIRST_PIECE] if _FIRST_PIECE <= token_id < VOCAB_SIZE else b""

    def tag_id(self, text: str) -> int | None:
        """Return None: no tag is one token."""
        return None

    def is_special(self, token_id: int) -> bool:
        """Return whether a token is left out of the text."""
        return 256 <= token_id < _FIRST_PIECE

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens."""
        return b"".join(map(self.token_bytes, token_ids)).decode(errors="replace")
