"""Noise for users' questions: insert and drop random tokens, so that the model learns to ignore unknown words.

A held-out question always has words that are not in the corpus. Works on token ids; the idea is EDA's random insertion
and deletion (Wei and Zou 2019).
"""

from random import Random

from benchmarks.demo_model.batches import Encoded

# Half of the rows stay unchanged, so that the model still learns clean questions.
_ROW_SHARE = 0.5
_INSERT_SHARE, _DROP_SHARE = 0.08, 0.05


def distract(rng: Random, row: Encoded, *, user_id: int, end_id: int, text_ids: range) -> Encoded:
    """Add noise between `user_id` and `end_id`; every other token stays."""
    if rng.random() >= _ROW_SHARE:
        return row
    token_ids: list[int] = []
    is_learned: list[bool] = []
    in_question = False
    for token_id, learned in zip(*row, strict=True):
        in_question = (in_question and token_id != end_id) or token_id == user_id
        may_change = in_question and token_id != user_id
        if may_change and rng.random() < _DROP_SHARE:
            continue
        if may_change and rng.random() < _INSERT_SHARE:
            noise = [rng.choice(text_ids) for _ in range(rng.choice((1, 1, 2, 3)))]
            token_ids += noise
            is_learned += [False] * len(noise)
        token_ids.append(token_id)
        is_learned.append(learned)
    return token_ids, is_learned
