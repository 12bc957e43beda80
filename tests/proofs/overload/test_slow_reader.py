"""Slow readers beside fast ones, on an engine with too few seats or too little memory. Pure core; counted in steps."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest

from streamserve.engine.config import Policy
from streamserve.engine.sequence import SequenceRequest
from tests.proofs.scale import scaled
from tests.support.engines.cores import Drive, alone, request, resuming, sampling

LEAD_TOKENS = 16
NUM_FAST = 8
SCARCE: dict[str, dict[str, Any]] = {
    "few seats": {"max_num_seqs": 2, "num_blocks": 257},
    "little memory": {"max_num_seqs": 8, "num_blocks": 60},
}
# No sequence parks: neither at the lead limit, nor for a waiting one.
NO_PARK: dict[str, Any] = {"lead_tokens": 10**6, "policy": Policy(min_ahead_seconds=1e9)}
ONLY_LEAD: dict[str, Any] = {"lead_tokens": LEAD_TOKENS, "policy": Policy(stalled_seconds=0.0, min_ahead_seconds=1e9)}


@dataclass(frozen=True)
class Scene:
    """One long answer whose reader stops reading, and short ones whose readers keep up."""

    slow: SequenceRequest
    fast: list[SequenceRequest]

    @classmethod
    def of(cls, seed: int) -> Scene:
        rng = random.Random(seed)

        def random_request(seq_id: int, max_tokens: int) -> SequenceRequest:
            how = sampling(max_tokens=max_tokens, temperature=rng.choice((0.0, 1.0)), seed=rng.randrange(2**40))
            prompt = [rng.randrange(128) for _ in range(rng.randint(8, 24))]
            return request(seq_id, prompt, sampling=how, reader_tokens=0)

        slow = random_request(0, rng.randint(120, 160))
        return cls(slow, [random_request(1 + number, rng.randint(20, 40)) for number in range(NUM_FAST)])

    @property
    def requests(self) -> list[SequenceRequest]:
        return [self.slow, *self.fast]

    def play(self, drive: Drive) -> int:
        """Run until the fast answers end; their readers read all after each step. Returns the number of steps."""
        drive.add(*self.requests)
        while not all(drive.answers[one.seq_id].finish_reason for one in self.fast):
            drive.step()
            for one in self.fast:
                drive.core.reader_at(one.seq_id, len(drive.answers[one.seq_id].token_ids))
        return len(drive.plans)


@cache
def references(seed: int) -> dict[int, list[int]]:
    """The answers of a scene, each from an engine of its own."""
    return {one.seq_id: alone(one, num_blocks=257) for one in Scene.of(seed).requests}


def read_on(drive: Drive, one: SequenceRequest, shown: list[int]) -> list[int]:
    """The reader is back and reads whenever there is something; return all that it has at the end."""
    for seq_id in range(100, 200):
        again = resuming(replace(one, seq_id=seq_id), output_token_ids=tuple(shown), reader_tokens=len(shown))
        answer = drive.run(again)[seq_id]
        shown = shown + answer.token_ids
        if answer.finish_reason is not None:
            return shown
        assert answer.park is not None
    raise AssertionError("it never ended")


@pytest.mark.parametrize("overlap", [False, True], ids=["one step at a time", "overlapped steps"])
@pytest.mark.parametrize("what", SCARCE)
def test_slow_reader(what: str, overlap: bool) -> None:
    """A slow reader parks at the lead limit; fast ones end in no more steps than without parks, and in fewer in all."""
    num_scenes, steps, steps_without = scaled(100, least=10), 0, 0
    for seed in range(num_scenes):
        scene = Scene.of(seed)
        drive = Drive(overlap=overlap, **SCARCE[what], **ONLY_LEAD)
        with_park = scene.play(drive)
        without = scene.play(Drive(overlap=overlap, **SCARCE[what], **NO_PARK))
        assert with_park <= without, f"scene {seed}"
        shown = drive.answers[0].token_ids
        assert len(shown) == LEAD_TOKENS, f"scene {seed}"
        assert decoded(drive) <= LEAD_TOKENS + overlap, f"scene {seed}"
        got = {one.seq_id: drive.answers[one.seq_id].token_ids for one in scene.fast}
        got[scene.slow.seq_id] = read_on(drive, scene.slow, shown)
        assert got == references(seed), f"scene {seed}"
        drive.assert_empty()
        steps += with_park
        steps_without += without
    assert steps < steps_without
    print(
        f"\nslow reader, {what}, {'overlapped' if overlap else 'in turn'}: {num_scenes} scenes, each stops at"
        f" {LEAD_TOKENS} tokens; {NUM_FAST} other answers in {steps / num_scenes:.0f} steps,"
        f" {steps_without / num_scenes:.0f} without park; all {num_scenes * (NUM_FAST + 1):,} answers the same"
    )


def decoded(drive: Drive) -> int:
    """Return the number of steps that made a token for the slow reader."""
    return sum(chunk.seq_id == 0 and bool(chunk.samples) for plan in drive.plans for chunk in plan.chunks)
