"""Laws of warm prompts: they use idle capacity only, and never take a step from an answer."""

from __future__ import annotations

import pytest

from streamserve.engine.config import LatencyClass, Policy
from streamserve.engine.sequence import SequenceRequest
from streamserve.protocol.requests import LATENCY_CLASSES, PREFILL_ONLY
from tests.support.engines.cores import PATIENT, Drive, request, sampling

OVERLAP = pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])


def warm(seq_id: int, prompt: range = range(100, 200), **fields: object) -> SequenceRequest:
    return request(seq_id, prompt, sampling=sampling(max_tokens=0), latency_class=PREFILL_ONLY, **fields)


def test_no_request_can_name_the_class() -> None:
    """A caller's request is an answer, and queues among answers."""
    assert PREFILL_ONLY not in LATENCY_CLASSES


def test_alone_it_is_computed_in_short_steps() -> None:
    """An answer that arrives meanwhile waits for a chunk, not for the whole prompt."""
    drive = Drive(prefill_chunk=16)
    answer = drive.run(warm(1))[1]
    assert [plan.num_tokens for plan in drive.plans] == [16] * 6 + [4]
    assert (answer.finish_reason, answer.token_ids) == ("length", [])
    drive.assert_empty()


@OVERLAP
def test_it_yields_to_every_answer(overlap: bool) -> None:
    """Each plan after an answer has arrived is without the warm prompt, and equals the plan made without it."""
    drive, alone = (Drive(prefill_chunk=16, overlap=overlap) for _ in range(2))
    drive.add(warm(1))
    for _ in range(3):
        drive.step()
    num_before = len(drive.plans)
    for one in (drive, alone):
        one.add(request(2, range(40)), request(3, range(50, 90)))
    alone.run()
    while not all(drive.answers[seq_id].finish_reason for seq_id in (2, 3)):
        drive.step()
    sizes = [[(c.seq_id, len(c.token_ids)) for c in plan.chunks] for plan in drive.plans[num_before:]]
    wanted = [[(c.seq_id, len(c.token_ids)) for c in plan.chunks] for plan in alone.plans]
    assert sizes[: len(wanted)] == wanted
    assert drive.answers[2].token_ids == alone.answers[2].token_ids
    assert drive.core.stats.preemptions == 0


def test_it_continues_when_the_answers_have_ended() -> None:
    """Its full blocks stayed cached."""
    drive = Drive(prefill_chunk=16)
    drive.add(warm(1))
    drive.step()
    drive.step()
    drive.run(request(2, range(8)))
    mine = [(chunk.start, len(chunk.token_ids)) for plan in drive.plans for chunk in plan.chunks if chunk.seq_id == 1]
    assert mine == [(0, 16), (16, 16), (32, 16), (48, 16), (64, 16), (80, 16), (96, 4)]
    assert drive.run(request(3, range(100, 200)))[3].num_cached_tokens == 96


def test_it_takes_no_memory_from_an_answer() -> None:
    """Where there is room for one only, an arriving answer gets it at once, and nothing parks for a warm prompt."""
    drive = Drive(num_blocks=26, prefill_chunk=16, policy=Policy(min_ahead_seconds=0.0))
    drive.add(warm(1))
    drive.step()
    drive.add(request(2, range(80), sampling=sampling(max_tokens=12), reader_tokens=0))
    drive.step()
    assert drive.planned() == {2: 80}
    drive.run()
    assert drive.answers[2].park is None
    assert drive.answers[1].finish_reason == "length"


def test_it_gives_up_while_the_engine_is_never_idle() -> None:
    """The caller gets an error, and may submit it again."""
    drive = Drive(
        classes={**PATIENT, PREFILL_ONLY: LatencyClass(ttft_seconds=1e9, max_queue_seconds=0.05)}, num_blocks=100
    )
    drive.add(request(2, sampling=sampling(max_tokens=30)), warm(1, arrived_at=100.0))
    for _ in range(12):
        drive.step()
    assert drive.answers[1].error == "queue_timeout"
