"""Which inputs a pass of an embedding model computes, and how long it may take."""

from __future__ import annotations

import random

import pytest

from streamserve.engine.embedding import FIRST_PASS_SECONDS, EchoEmbedder, EmbedQueue, PassTime, Work
from streamserve.protocol.embeddings import numbers_of


def work(*lengths: int, tenant: str = "a", **fields: bool) -> Work:
    return Work([[1] * length for length in lengths], None, tenant=tenant, **fields)


def lengths(queue: EmbedQueue, most: int = 100) -> list[int]:
    return [len(item.token_ids) for item in queue.take(most)]


def test_a_pass_has_no_more_tokens_than_it_may_padding_counted() -> None:
    """Every input is computed once, whatever comes; one input alone may be longer."""
    seed = random.randrange(10_000)
    draw = random.Random(seed)
    queue, added = EmbedQueue(), []
    for _ in range(50):
        one = work(*(draw.randint(1, 150) for _ in range(draw.randint(1, 9))), tenant=draw.choice("abc"))
        added.append(one)
        queue.add(one)
    taken = []
    while items := queue.take(100):
        longest = max(len(item.token_ids) for item in items)
        assert len(items) == 1 or longest * len(items) <= 100, f"seed {seed}"
        taken += [(id(item.work), item.index) for item in items]
    assert sorted(taken) == sorted((id(one), index) for one in added for index in range(len(one.inputs)))
    assert len(queue) == 0


def test_tenants_take_turns() -> None:
    """A question is in the next pass, however many documents of another tenant came before it."""
    queue = EmbedQueue()
    queue.add(work(*[10] * 40))
    queue.add(work(10, tenant="b"))
    assert {item.work.tenant for item in queue.take(100)} == {"a", "b"}
    queue.add(work(10, 10, tenant="c"))
    tenants = [item.work.tenant for item in queue.take(40)]
    assert sorted(tenants) == ["a", "a", "c", "c"]


def test_inputs_of_a_request_are_taken_by_length() -> None:
    """The longest first: a pass is padded least."""
    queue = EmbedQueue()
    queue.add(work(1, 20, 2, 19))
    assert lengths(queue, 40) == [20, 19]
    assert lengths(queue, 40) == [2, 1]


def test_rows_of_batches_come_where_nothing_else_waits() -> None:
    """They fill up a pass."""
    queue = EmbedQueue()
    queue.add(work(10, 10, is_batch=True))
    queue.add(work(10))
    assert [item.work.is_batch for item in queue.take(20)] == [False, True]


def test_what_is_withdrawn_is_not_computed() -> None:
    """Its other inputs are dropped when their turn comes."""
    queue, left, stays = EmbedQueue(), work(5, 5, 5), work(4, tenant="b")
    queue.add(left)
    queue.add(stays)
    assert lengths(queue, 5) == [5]
    left.is_withdrawn = True
    assert lengths(queue) == [4]
    assert len(queue) == 0


def test_a_pass_is_bounded_by_the_measured_time() -> None:
    """Until there is a measurement it is small; a slow machine still computes some hundred tokens."""
    times = PassTime(10_000, 0.5)
    assert times.most_tokens == 1024
    assert times.seconds_allowed(100, 12.0) == FIRST_PASS_SECONDS
    times.note(1000, 1.0)
    assert times.most_tokens == 500
    assert times.seconds_allowed(10_000, 12.0) == pytest.approx(80.0)
    times.note(1000, 100.0)
    assert times.most_tokens == 256


def test_the_echo_model_puts_texts_with_common_words_near_each_other() -> None:
    """It needs no weights; the same text has the same vector, of length 1."""
    model = EchoEmbedder()
    texts = ["How do I pause my subscription?", "pause a subscription", "the weather in spring"]
    first, near, far = (numbers_of(one or b"") for one in model.embed(model.encode(texts), [None] * 3))

    def cosine(other: list[float]) -> float:
        return sum(x * y for x, y in zip(first, other, strict=True))

    assert cosine(first) == pytest.approx(1.0, abs=1e-5)
    assert cosine(near) > cosine(far) + 0.2
