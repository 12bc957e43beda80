"""Laws of the queue: its order, the bound of a wait, and expiry."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from streamserve.engine.config import CLASSES, LatencyClass, Policy
from streamserve.engine.kv.pool import BlockPool
from streamserve.engine.policy.backlog import Rank
from streamserve.engine.policy.waiting import rank_of
from streamserve.engine.sequence import Sequence, SequenceRequest, State
from tests.support.engines.cores import PATIENT, request, sampling
from tests.support.engines.desk import Desk, teach

SMALLEST_TTFT = min(one.ttft_seconds for one in CLASSES.values())


def key_of(desk: Desk, seq_id: int, **fields: object) -> float:
    """The place of a request that comes now."""
    (sequence,) = desk.add(request(seq_id, **{"arrived_at": desk.now, **fields}))
    return sequence.ticket.order_key[1] - desk.now


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("num_tokens", [1, 200, 1400, 100_000])
def test_key_is_arrival_class_and_length(name: str, num_tokens: int) -> None:
    """Without debt, a request's place is its arrival, its class's time to the first token, and a little for its prompt.

    A token is half a millisecond, and seven tenths of a second are the most; nothing where no wait is limited.
    """
    seconds = min(0.0005 * num_tokens, 0.7) if CLASSES[name].max_queue_seconds is not None else 0.0
    key = key_of(Desk(), 1, latency_class=name, prompt=(7,) * num_tokens)
    assert key == pytest.approx(CLASSES[name].ttft_seconds + seconds)


def test_short_prompts_go_first() -> None:
    """Of requests that come together the shorter prompt goes first; one that came seven tenths of a second before not.

    So many short prompts delay a long one, and none for longer than that.
    """
    desk = Desk(max_num_seqs=1, num_blocks=500)
    long, short = (7,) * 1500, (8,) * 10
    one = quick(1, desk, 0.0, prompt=long)
    others = [quick(2, desk, 0.6, prompt=short), quick(3, desk, 0.8, prompt=short)]
    assert order_of(desk, one, *others) == [2, 1, 3]


def test_classes_come_from_the_config() -> None:
    """A site's own class counts like a built-in one."""
    desk = Desk(classes={"exam": LatencyClass(ttft_seconds=1.5)})
    assert key_of(desk, 1, latency_class="exam") == pytest.approx(1.5)


def work_of(desk: Desk) -> None:
    """For ten seconds nine tenths of the work were one tenant's."""
    for second in range(10):
        desk.scheduler.queue.shares.charge("flood", 90, desk.now - second)
        desk.scheduler.queue.shares.charge("light", 10, desk.now - second)


def order_of(desk: Desk, *requests: SequenceRequest) -> list[int]:
    """The order in which these start, one after the other; none of them is charged."""
    desk.add(*requests)
    desk.run()
    return [one.seq_id for one in sorted(desk.sequences.values(), key=lambda one: one.scheduled_at or 0.0)]


def quick(seq_id: int, desk: Desk, late: float, **fields: object) -> SequenceRequest:
    how = {"arrived_at": desk.now + late, "sampling": sampling(max_tokens=1), **fields}
    return request(seq_id, **how)


@pytest.mark.parametrize("name", ["chat", "completion", "document"])
def test_a_tenant_above_its_share_goes_last(name: str) -> None:
    """In each class, whichever class its work was in, and however late the other comes."""
    desk = Desk(max_num_seqs=1)
    work_of(desk)
    flood = [quick(seq_id, desk, 0.0, tenant="flood") for seq_id in (1, 2)]
    assert order_of(desk, *flood, quick(3, desk, 1.0, tenant="light", latency_class=name)) == [3, 1, 2]


def test_keys_decide_between_tenants_near_their_shares() -> None:
    """A debt below `max_debt_seconds` changes no order."""
    desk = Desk(max_num_seqs=1, policy=Policy(max_debt_seconds=5.0))
    work_of(desk)
    flood = [quick(seq_id, desk, 0.0, tenant="flood") for seq_id in (1, 2)]
    assert order_of(desk, *flood, quick(3, desk, 1.0, tenant="light")) == [1, 2, 3]


def test_a_row_of_a_batch_does_not_go_first_by_its_tenant() -> None:
    """A chat of a tenant above its share goes before another's row, which goes by its key alone."""
    desk = Desk(max_num_seqs=1)
    work_of(desk)
    rows = [quick(1, desk, 0.0, tenant="light", latency_class="batch")]
    assert order_of(desk, *rows, quick(2, desk, 1.0, tenant="flood")) == [2, 1]


def test_an_answer_that_was_preempted_goes_by_its_key() -> None:
    """Its reader waits for it: no share of its tenant matters."""
    desk = Desk(max_num_seqs=1)
    work_of(desk)
    desk.add(request(1, tenant="flood", arrived_at=desk.now))
    desk.step()
    desk.add(quick(2, desk, 1.0, tenant="light"))
    desk.scheduler.forced_preempt = lambda running: running
    desk.step()
    desk.scheduler.forced_preempt = None
    assert list(desk.planned()) == [1]


def test_who_is_late_goes_behind_who_is_in_time() -> None:
    """A chat that has waited for more than its 2.1 s is passed by all that can still be in time, and then goes."""
    desk = Desk(max_num_seqs=1)
    desk.add(request(1, sampling=sampling(max_tokens=200)), *(quick(seq_id, desk, 0.0) for seq_id in (2, 3)))
    desk.step()
    desk.now += 2.2
    desk.add(quick(4, desk, 0.0), quick(5, desk, 0.1))
    desk.scheduler.finish(desk.sequences[1])
    desk.run()
    order = sorted(desk.sequences.values(), key=lambda one: one.scheduled_at or 0.0)
    assert [one.seq_id for one in order] == [1, 4, 5, 2, 3]


def test_who_is_late_is_refused_when_the_overload_stands() -> None:
    """Requests that are in time take every place for eight seconds: then a late one waits no longer."""
    desk = Desk(max_num_seqs=1)
    desk.add(request(1, sampling=sampling(max_tokens=10_000)), quick(2, desk, 0.0))
    begun = desk.now
    ends = []
    for index in range(100):
        desk.add(quick(10 + index, desk, 0.0))
        desk.step(0.1)
        for sequence in desk.scheduler.queue.expired(desk.now):
            ends.append((sequence.seq_id, round(desk.now - begun, 1)))
            desk.scheduler.finish(sequence)
    assert ends[0] == (2, 8.1)
    assert ends[-1][1] - (ends[-1][0] - 10) * 0.1 <= 2.1 + 0.2


def test_place_is_fixed_at_arrival() -> None:
    """Later work of the tenant, and a preemption, change nothing."""
    desk = Desk()
    (sequence,) = desk.add(request(1, tenant="flood"))
    before = sequence.ticket.order_key
    desk.step()
    desk.scheduler.queue.shares.charge("flood", 1000, desk.now)
    desk.scheduler.queue.shares.charge("light", 1, desk.now)
    desk.scheduler.forced_preempt = lambda running: running
    desk.step()
    assert sequence.num_preemptions == 1
    assert sequence.ticket.order_key == before


@pytest.mark.parametrize("seed", range(10))
def test_wait_bound(seed: int) -> None:
    """Of one tenant, none that comes later than r by r's order_seconds - the smallest TTFT goes before r in time.

    All other classes go before rows of batches.
    """
    rng, desk = random.Random(seed), Desk(max_num_seqs=1, classes=PATIENT)
    for seq_id in range(60):
        desk.now += rng.expovariate(4)
        desk.scheduler.queue.shares.charge(rng.choice("aab"), rng.randint(1, 500), desk.now)
        one = sampling(max_tokens=1)
        name, tenant = rng.choice(["chat", "completion", "document", "batch"]), rng.choice("ab")
        desk.add(request(seq_id, arrived_at=desk.now, latency_class=name, tenant=tenant, sampling=one))
    desk.run()
    order = sorted(desk.sequences.values(), key=lambda one: one.scheduled_at or 0.0)
    for index, late in enumerate(order):
        for first in order[:index]:
            if first.request.admission.share_of == late.request.admission.share_of and rank_of(late) == Rank.ANSWERS:
                assert rank_of(first) == Rank.ANSWERS or (first.scheduled_at or 0.0) < late.request.arrived_at
                latency_class = CLASSES[late.request.latency_class]
                bound = latency_class.order_seconds(len(late.request.prompt_token_ids)) - SMALLEST_TTFT
                assert first.request.arrived_at <= late.request.arrived_at + bound + 1e-9


def test_light_tenant_goes_before_a_flood() -> None:
    """One tenant submits five times what the engine can do: a light one soon waits for the next free place only."""
    desk = Desk(max_num_seqs=2, num_blocks=400)
    light: list[Sequence] = []
    for index in range(1_500):
        desk.add(flooding(10_000 + index, desk.now, "flood"))
        if index % 60 == 0:
            light += desk.add(flooding(index, desk.now, "light"))
        for chunk in desk.step(0.05).chunks:
            tenant = desk.sequences[chunk.seq_id].request.admission.share_of
            desk.scheduler.queue.shares.charge(tenant, len(chunk.token_ids), desk.now)
        for sequence in desk.scheduler.queue.expired(desk.now):
            desk.scheduler.finish(sequence)
    waits = [round((one.scheduled_at or desk.now) - one.request.arrived_at, 2) for one in light]
    assert len(desk.scheduler.waiting) > 20
    assert max(waits[1:]) <= 10 * 0.05  # an answer of the flood takes ten steps, and two never begin together


def flooding(seq_id: int, now: float, tenant: str) -> SequenceRequest:
    return request(seq_id, tenant=tenant, salt=tenant, arrived_at=now)


def test_sequences_that_wait_too_long_are_returned() -> None:
    """Half a minute after it came, a chat that never ran has expired; the one that runs has not."""
    desk = Desk(max_num_seqs=1)
    desk.add(request(1, arrived_at=100.0, sampling=sampling(max_tokens=400)), request(2, arrived_at=100.0))
    desk.step(seconds=0.0)
    desk.step(seconds=30.0)
    assert desk.scheduler.queue.expired(130.0) == []
    assert [one.seq_id for one in desk.scheduler.queue.expired(130.01)] == [2]


def test_each_class_has_its_own_patience() -> None:
    """Half a minute expires a chat and not a batch row; a class may set its own limit."""
    patient = {**CLASSES, "slow chat": LatencyClass(ttft_seconds=0.5, max_queue_seconds=60.0)}
    desk = Desk(max_num_seqs=1, classes=patient)
    desk.add(request(1, arrived_at=0.0, sampling=sampling(max_tokens=400)))
    for seq_id, name in enumerate(("chat", "slow chat", "batch"), 2):
        desk.add(request(seq_id, arrived_at=desk.now, latency_class=name))
    desk.step()
    desk.step(seconds=31.0)
    assert [one.seq_id for one in desk.scheduler.queue.expired(desk.now)] == [2]


def test_a_promise_is_kept() -> None:
    """A request that was given a wait limit at admission keeps it, however the queue stands."""
    desk = Desk(max_num_seqs=1)
    desk.add(
        request(1, sampling=sampling(max_tokens=400)), request(2, queue_seconds=2.5), request(3, queue_seconds=50.0)
    )
    desk.step(seconds=0.0)
    assert [one.seq_id for one in desk.scheduler.queue.expired(102.6)] == [2]
    assert [one.seq_id for one in desk.scheduler.queue.expired(151.0)] == [2, 3]


def test_sequence_with_shown_tokens_never_expires() -> None:
    """A resumed answer, or one that was preempted, waits without a limit."""
    desk = Desk(max_num_seqs=1)
    desk.add(request(1))
    desk.step()
    desk.scheduler.forced_preempt = lambda running: running
    desk.add(request(0), request(3, output_token_ids=(7, 7)))
    desk.step()
    assert [one.seq_id for one in desk.scheduler.waiting] == [0, 3]
    assert [one.seq_id for one in desk.scheduler.queue.expired(desk.now + 3600)] == [0]


def test_time_before_the_queue_does_not_count() -> None:
    """The time before `add` does not count as queue time; the order is still by arrival."""
    desk = Desk(max_num_seqs=1)
    desk.add(request(1, arrived_at=0.0), request(2, arrived_at=10.0))
    desk.step()
    assert desk.scheduler.queue.expired(desk.now + 1.0) == []


def test_lone_request_never_waits() -> None:
    """With nothing running, whatever fits is scheduled at once: no reserve applies, and no batch is waited for."""
    desk = Desk(num_blocks=11)
    desk.scheduler._reserve._share = 100.0
    desk.add(request(1, range(20), sampling=sampling(max_tokens=20)))
    desk.step()
    assert desk.planned() == {1: 20}


def test_queued_tokens_are_those_of_the_waiting() -> None:
    """The running count equals the sum over the queue, whatever happens."""
    rng, desk = random.Random(3), Desk(num_blocks=40, max_num_seqs=4)
    desk.scheduler.forced_preempt = lambda running: [one for one in running if rng.random() < 0.1]
    for seq_id in range(40):
        desk.add(request(seq_id, range(rng.randint(1, 60))))
        desk.step()
        waiting = desk.scheduler.waiting
        if waiting and rng.random() < 0.3:
            desk.scheduler.finish(rng.choice(waiting))
        assert desk.scheduler.queued_tokens == sum(len(one.token_ids) for one in waiting)
    desk.run()
    assert desk.scheduler.queued_tokens == 0


def test_queued_seconds_by_the_step_time_model() -> None:
    """Nothing until a model exists; then a base for each step and the tokens' cost."""
    desk = Desk(max_num_batched_tokens=100, num_blocks=400)
    desk.add(request(1, range(250)))
    assert desk.scheduler.queued_seconds() == 0.0
    teach(desk.scheduler.step_time)
    assert desk.scheduler.queued_seconds() == pytest.approx(3 * 0.01 + 250 * 0.001, rel=0.01)
    desk.scheduler.finish(desk.sequences[1])
    assert desk.scheduler.queued_seconds() == 0.0


def test_starting_over_keeps_the_queue() -> None:
    """After a fault the waiting keep their order and run in the new pool; the running are finished, without blocks."""
    desk = Desk(max_num_seqs=2)
    desk.add(*(request(seq_id) for seq_id in (1, 2, 3, 4, 5)))
    desk.step()
    desk.pool = BlockPool(65, 4)
    touched = desk.scheduler.start_over(desk.pool, reversed(desk.sequences.values()))
    assert sorted(one.seq_id for one in touched) == [1, 2]
    assert all(one.state is State.FINISHED and not one.held.block_table for one in touched)
    assert [one.seq_id for one in desk.scheduler.waiting] == [3, 4, 5]
    assert desk.scheduler.queued_tokens == 60
    desk.run()
    assert [desk.sequences[seq_id].num_output_tokens for seq_id in (3, 4, 5)] == [10, 10, 10]


def test_waiting_and_running_stay_in_order() -> None:
    """Both lists are sorted by key after every step of a crowded run."""
    desk = Desk(num_blocks=30, max_num_seqs=4)
    desk.add(*(request(seq_id, range(seq_id % 20 + 1), arrived_at=float(seq_id * 7 % 30)) for seq_id in range(30)))
    while desk.scheduler.waiting or desk.scheduler.running:
        desk.step()
        for group in (desk.scheduler.waiting, desk.scheduler.running):
            assert all(left.ticket.order_key < right.ticket.order_key for left, right in pairwise(group))
