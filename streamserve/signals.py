"""The signals of answers, jobs and ratings, for a site's own code. docs/signals.md has an example that bills.

    answer_started     in the transaction that inserts the row of an answer's stream
    answer_finished    in the transaction that writes the end of an answer
    job_finished       in the transaction that writes the end of a job
    message_rated      in the transaction that writes a rating
    answer_refused     after a request for an answer was refused; in no transaction

What a receiver of the first four writes in the same database is committed with the row: together, once, or not at all.
A transaction that is undone and done again calls them again. Receivers run on threads of their own, never on the event
loop (rows/receivers.py); where a signal has none, nothing is done for it.

Each signal gives the names below it, beside Django's `sender` and `signal`. All but the last give `row`, whose model is
the sender, and whose it is: `owner` ("user:5", "key:3", "anon:…", "site:…"), `tenant`, `user_id` (of a user's keys,
too) and `key_id`; what does not apply is None.
"""

from __future__ import annotations

from django.dispatch import Signal

answer_started = Signal()
"""`row`, a `Stream`; `stream_id`, `model`, `owner`, `tenant`, `user_id`, `key_id`, `conversation_id`, `message_id`,
`job_id`. A job's answer starts when the job is queued. The answer of a batch's row has no stream's row, and no start.
"""

answer_finished = Signal()
"""What `answer_started` gives, and how the answer ended, done or failed: `usage` (`prompt_tokens`, `cached_tokens`,
`completion_tokens`), `finish_reason` and `error_code` (one of them is ""), `seconds` from its start to its end,
`ttft_seconds` to its first token, and `phases`, the seconds of each phase of its latency. `row.text` is the answer only
if STORE is on. Of a batch's row: `row` is a `BatchRow`, `batch_id` its batch, and `stream_id` is in no other row.
"""

job_finished = Signal()
"""`row`, a `Job`; `job_id`, `stream_id`, `pipeline`, `owner`, `tenant`, `user_id`, `key_id`, `state` (done, failed or
cancelled), `error_code`, `attempts`, and `seconds` since it was queued. Its answer's `answer_finished` is another
transaction, before it.
"""

message_rated = Signal()
"""`row`, a `Message`; `message_id`, `conversation_id`, `stream_id`, `model`, `owner`, `tenant`, `user_id`, `key_id`,
`rating` (1, -1, or None: taken back) and `comment`.
"""

answer_refused = Signal()
"""`code`, `param`, `status` (HTTP's), `message`, `model` ("" where none is known yet), `owner` ("" where the caller is
unknown), `tenant`, `user_id`, `key_id`, and `transport` ("http", "websocket" or "python"). The sender is None.
"""
