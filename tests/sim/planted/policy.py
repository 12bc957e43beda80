"""Faults of the policy: who decodes, who is admitted, who is late, how fast readers are, what tenants had."""

from __future__ import annotations

from functools import partial

from tests.sim.planted import Mutant

_scheduler = partial(Mutant, file="scheduler.py")
_leads = partial(Mutant, file="policy/leads.py")
_patience = partial(Mutant, file="policy/backlog.py")
_reader = partial(Mutant, file="policy/pace.py")
_tenants = partial(Mutant, file="policy/waiting.py")
_waiting = partial(Mutant, file="policy/waiting.py")
_output = partial(Mutant, file="output.py")

MUTANTS = (
    _scheduler(
        name="admission goes before hungry decodes",
        law=37,
        old="num_seats - len(wanted.hungry) - len(wanted.prompts)",
        new="num_seats - len(wanted.prompts)",
    ),
    _scheduler(
        name="the most ahead decode first",
        law=10,
        old="sorted(by_lead, key=itemgetter(0))",
        new="sorted(by_lead, key=itemgetter(0), reverse=True)",
    ),
    _scheduler(
        name="the oldest decode first, and the newest starve",
        law=38,
        old="sorted(by_lead, key=itemgetter(0))",
        new="by_lead",
    ),
    _scheduler(
        name="those ahead are left out though there are seats",
        law=10,
        old="        self._decode([*wanted.hungry, *wanted.ahead], most, step, now, spares_peers=True)\n",
        new="",
    ),
    _scheduler(
        name="no seat is kept for prompts that have begun",
        law=10,
        old="num_kept = min(len(wanted.prompts), max(1, num_seats // 2))",
        new="num_kept = 0",
    ),
    _scheduler(
        name="prompts take every seat",
        law=10,
        old="num_kept = min(len(wanted.prompts), max(1, num_seats // 2))",
        new="num_kept = min(len(wanted.prompts), num_seats)",
    ),
    _scheduler(
        name="more are admitted than may be",
        law=9,
        old="self._max_admitted = math.inf if config.max_admitted is None else config.max_admitted",
        new="self._max_admitted = math.inf",
    ),
    _scheduler(
        name="one too many in the batch",
        law=9,
        old="            if len(step.chunks) >= most or step.num_tokens <= 0:\n",
        new="            if len(step.chunks) > most or step.num_tokens <= 0:\n",
    ),
    _scheduler(
        name="a preempted sequence's chunk stays in the plan",
        law=9,
        old="        step.remove(sequence)\n        step.closed_from",
        new="        step.closed_from",
    ),
    _scheduler(
        name="one ahead preempts another",
        law=12,
        old="spares_peers=spares_peers and bool(step.chunks)",
        new="spares_peers=False",
    ),
    _scheduler(
        name="starvation: a sequence that does not fit is passed by",
        law=11,
        old="                if not has_started:\n",
        new=(
            "                if not has_started:\n"
            "                    any(self._start(one, step, now) for one in self.waiting[1:])\n"
        ),
    ),
    _scheduler(
        name="starvation: admission waits until the begun prompts are computed",
        law=34,
        old="may_start = num_starts > 0 and",
        new="may_start = not begun and num_starts > 0 and",
    ),
    _scheduler(
        name="admission continues after a preemption",
        law=12,
        old="min(step.closed_from, rank_of(sequence))",
        new="min(step.closed_from, max(rank_of(sequence), Rank.ROWS))",
    ),
    _scheduler(
        name="a preempted sequence is lost",
        law=8,
        old="        sequence.num_preemptions += 1\n        self.queue.put(sequence)",
        new="        sequence.num_preemptions += 1",
    ),
    _scheduler(
        name="a preempted sequence counts as not preempted",
        law=28,
        old="        sequence.num_preemptions += 1\n        self.queue.put(sequence)",
        new="        self.queue.put(sequence)",
    ),
    _scheduler(
        name="a decode gets a block with every token",
        law=6,
        old="        return self._pool.num_lacking(sequence, sequence.num_launched_tokens + 1)\n",
        new="        return 1\n",
    ),
    _leads(
        name="a park for a waiting sequence ends too late",
        law=23,
        old="resume_seconds=min(sequence.ahead_seconds(now) / 2, _MOST_RESUME_SECONDS)",
        new="resume_seconds=min(sequence.ahead_seconds(now), _MOST_RESUME_SECONDS)",
    ),
    _leads(
        name="a sequence parks that has given no token",
        law=23,
        old="has_moved = sequence.num_output_tokens > len(sequence.request.output_token_ids)",
        new="has_moved = True",
    ),
    _waiting(
        name="ties in the queue are broken by addresses",
        law=31,
        old="order_key=(rank, key, request.seq_id)",
        new="order_key=(rank, key, id(request))",
    ),
    _waiting(
        name="the last in the queue goes first",
        law=25,
        old="order_key=(rank, key,",
        new="order_key=(rank, -key,",
    ),
    _waiting(
        name="long prompts wait no longer than short ones",
        law=25,
        old="num_tokens, token_seconds = len(request.prompt_token_ids),",
        new="num_tokens, token_seconds = 0,",
    ),
    _waiting(
        name="an answer that comes back is put back for what it has shown",
        law=25,
        old="num_tokens, token_seconds = len(request.prompt_token_ids),",
        new="num_tokens, token_seconds = len(request.prompt_token_ids + request.output_token_ids),",
    ),
    _waiting(
        name="the queue is in the order of return",
        law=25,
        old="order_key=(rank, key,",
        new="order_key=(rank, now,",
    ),
    _waiting(
        name="preempted sequences go to the end of the queue",
        law=8,
        old="        insort(self.sequences, sequence, key=order_key)\n",
        new="        self.sequences.append(sequence)\n",
    ),
    _waiting(
        name="what is late goes first",
        law=25,
        old="kind = sequence.ticket.late_at < now, _is_limited(sequence)",
        new="kind = False, _is_limited(sequence)",
    ),
    _waiting(
        name="an answer that has begun waits for its turn",
        law=25,
        old="            if not sequence.is_new:\n                return sequence\n",
        new="",
    ),
    _waiting(
        name="the heaviest tenant goes first",
        law=25,
        old="(ranks[one.ticket.tenant], one.ticket.order_key)",
        new="(-ranks[one.ticket.tenant], one.ticket.order_key)",
    ),
    _waiting(
        name="no tenant's share counts",
        law=25,
        old="(ranks[one.ticket.tenant], one.ticket.order_key)",
        new="one.ticket.order_key",
    ),
    _waiting(
        name="a tenant's share counts for rows of a batch that have begun",
        law=25,
        old="            if not sequence.is_new:\n",
        new="            if not sequence.is_new and rank != Rank.ROWS:\n",
    ),
    _waiting(
        name="rows of batches are in the order of all others",
        law=25,
        old="_RANKS = {BATCH: Rank.ROWS, ",
        new="_RANKS = {",
    ),
    _waiting(
        name="rows of batches start in their turn",
        law=25,
        old="            if rank_of(sequence) != rank:\n                break\n",
        new="",
    ),
    _waiting(
        name="a row that has begun goes before other classes",
        law=25,
        old="            if rank_of(sequence) != rank:\n",
        new="            if rank_of(sequence) != rank and sequence.is_new:\n",
    ),
    _scheduler(
        name="rows of batches decode beside all others",
        law=10,
        old="            if rank_of(sequence) != rank or sequence.seq_id in step.chunks:\n",
        new="            if sequence.seq_id in step.chunks:\n",
    ),
    _scheduler(
        name="no row gives way to what waits",
        law=23,
        old="            if later:\n",
        new=(
            "            if taker.state is State.WAITING and not parking:\n"
            "                return False\n"
            "            if later and taker.state is State.RUNNING:\n"
        ),
    ),
    _scheduler(
        name="the oldest row gives way",
        law=12,
        old="self._preempt(later[-1], step)",
        new="self._preempt(later[0], step)",
    ),
    _scheduler(
        name="others park for rows of batches",
        law=23,
        old="        if rank_of(sequence) != rank_of(taker):\n            return False\n",
        new="",
    ),
    _scheduler(
        name="what is held parks before rows give way",
        law=23,
        old="            if later:\n",
        new="            if later and not any(leads.rests(one, self._config) for one in parking):\n",
    ),
    _scheduler(
        name="a row that gave way starts again at once",
        law=12,
        old="        step.closed_from = min(step.closed_from, rank_of(sequence))\n",
        new="        if rank_of(sequence) == Rank.ANSWERS:\n            step.closed_from = Rank.ANSWERS\n",
    ),
    _scheduler(
        name="memory is kept free for rows of batches",
        law=23,
        old="peers = [one for one in staying if rank_of(one) <= rank_of(sequence)]",
        new="peers = staying",
    ),
    _scheduler(
        name="rows of batches take long steps",
        law=29,
        old="            step.is_short = step.is_short or rank > Rank.ANSWERS  # what comes waits for its end\n",
        new="",
    ),
    _output(
        name="rows of batches count in full",
        law=25,
        old="weight = self._batch_weight if rank_of(part.sequence) == Rank.ROWS else 1.0",
        new="weight = 1.0",
    ),
    _waiting(
        name="no sequence is in the queue too long",
        law=20,
        old="        return refused\n",
        new="        return []\n",
    ),
    _waiting(
        name="the queue time ends half way",
        law=20,
        old="expires_at = now + (wanted",
        new="expires_at = now + 0.5 * (wanted",
    ),
    _waiting(
        name="a late sequence is refused in a burst",
        law=20,
        old="if ticket.expires_at < now or self.patience.is_standing(name, now):",
        new="if ticket.expires_at < now or ticket.late_at < now:",
    ),
    _waiting(
        name="a scheduled sequence is refused",
        law=20,
        old="            if sequence.is_new and (ticket.expires_at < now or ticket.late_at < now):\n",
        new="            if ticket.expires_at < now or ticket.late_at < now:\n",
    ),
    _waiting(
        name="rows of a batch make an overload",
        law=20,
        old="one.is_new and one.ticket.is_in_time(now)",
        new="one.is_new and now <= one.ticket.late_at",
    ),
    _patience(
        name="every queue is a burst",
        law=20,
        old="return self.empty_at is not None and now - self.empty_at > seconds",
        new="return False",
    ),
    _patience(
        name="no queue is a burst",
        law=20,
        old="return self.empty_at is not None and now - self.empty_at > seconds",
        new="return True",
    ),
    _patience(
        name="a queue that refusals have emptied is a burst",
        law=20,
        old="is_empty = not has_in_time and now - self.refused_at > quiet_seconds",
        new="is_empty = not has_in_time",
    ),
    _patience(
        name="an overload never ends",
        law=20,
        old="        if self.empty_at is None or is_empty:\n",
        new="        if self.empty_at is None:\n",
    ),
    _reader(
        name="a starved reader seems slow",
        law=39,
        old="        if has_waited and num_tokens <= self.pace * seconds:\n            return\n",
        new="",
    ),
    _reader(
        name="a reader that waits seems not to",
        law=39,
        old="has_waited=num_read > self._num_known)",
        new="has_waited=num_read > num_tokens)",
    ),
    _reader(
        name="what was read since the report is forgotten",
        law=10,
        old="        return (unread - read) / self.pace\n",
        new="        return unread / self.pace\n",
    ),
    _reader(
        name="without a reader an answer is ahead",
        law=10,
        old="return min(0.0, (num_tokens - self._num_known) / self.pace - seconds)",
        new="return (num_tokens - self._num_known) / self.pace - seconds",
    ),
    _reader(
        name="hunger does not grow",
        law=10,
        old="            return -seconds\n",
        new="            return 0.0\n",
    ),
    _output(
        name="a reader never moves",
        law=22,
        old="            sequence.reader.report(num_tokens, sequence.num_output_tokens, now, is_away=is_away)\n",
        new="            pass\n",
    ),
    _waiting(
        name="a new sequence has no reader",
        law=22,
        old="ReaderPace(request.reader_tokens, latency_class.pace)",
        new="ReaderPace(None, latency_class.pace)",
    ),
    _tenants(
        name="a light tenant has a heavy one's debts",
        law=25,
        old="int((self._tokens.get(tenant, 0) - share) / unit)",
        new="int((share - self._tokens.get(tenant, 0)) / unit)",
    ),
    _tenants(
        name="no tenant has debts",
        law=25,
        old="int((self._tokens.get(tenant, 0) - share) / unit)",
        new="0",
    ),
    _tenants(
        name="a newcomer has no share",
        law=25,
        old="share = self._total / len(self._tokens.keys() | waiting)",
        new="share = self._total / len(self._tokens)",
    ),
    _tenants(
        name="a tenant is charged for other work",
        law=25,
        old="        self._tokens[tenant] = self._tokens.get(tenant, 0.0) + num_tokens\n",
        new='        self._tokens["a"] = self._tokens.get("a", 0.0) + num_tokens\n',
    ),
    _tenants(
        name="debts never expire",
        law=25,
        old="while self._slices and self._slices[0][0] < first:",
        new="while self._slices and self._slices[0][0] < first - 1000:",
    ),
)
