"""`HungerLaws`: how far ahead readers are, from a list of their reports, and who decodes because of that."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from streamserve.engine.plan import StepPlan
from streamserve.engine.policy.pace import MIN_PACE, REPORT_TOKENS
from streamserve.engine.sequence import Sequence, State
from tests.sim.laws.debts import is_row

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation


class Report:
    """The last that is known of a reader: when it had read how many tokens, of how many; and its pace then."""

    def __init__(self, num_read: int | None, num_tokens: int, at: float, pace: float, *, is_away: bool) -> None:
        self.num_read, self.num_tokens, self.at, self.pace, self.is_away = num_read, num_tokens, at, pace, is_away

    def ahead(self, num_tokens: int, pace: float, now: float) -> float:
        """Seconds that it can go on without a new token."""
        if self.num_read is None:
            return min(0.0, (num_tokens - self.num_tokens) / pace - (now - self.at))
        if self.is_away:
            return float("inf")
        if num_tokens <= self.num_read:
            return self.at - now
        since = max(min(pace * (now - self.at), REPORT_TOKENS), MIN_PACE * (now - self.at))
        return (num_tokens - self.num_read - since) / pace


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """What a plan holds of one group, and what was left for it: all other classes come first, then rows of batches."""

    running: list[Sequence]
    decodes: list[Sequence]
    admitted: list[Sequence]
    planned: set[int]
    num_seats: int
    is_spent: bool
    is_last: bool


class HungerLaws:
    """`pauses`: how often a sequence that could decode was left out. `longest`: for how many steps a hungry one was."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.pauses = self.longest = 0
        self.beyond: set[int] = set()  # at their lead, and decoded what another one waited for
        self._reports: dict[int, Report] = {}
        self._out: Counter[int] = Counter()
        self._allowed: dict[int, float] = {}
        self._wrong: list[str] = []

    def watch(self) -> None:
        """Record what readers report to this core, and when answers come back to it."""
        output, queue = self.sim.core._output, self.sim.core.scheduler.queue
        reader_at, add = output.reader_at, queue.add

        def noted_add(sequence: Sequence, now: float) -> None:
            add(sequence, now)
            if sequence.num_output_tokens:
                self._begin(sequence, now)

        def noted(seq_id: int, num_tokens: int | None, now: float, *, is_away: bool = False) -> None:
            sequence, before = output.sequences.get(seq_id), self._reports.get(seq_id)
            reader_at(seq_id, num_tokens, now, is_away=is_away)
            if sequence is not None and before is not None:
                self._note_report(sequence, before, num_tokens, now, is_away=is_away)

        queue.add = noted_add  # type: ignore[method-assign]
        output.reader_at = noted  # type: ignore[method-assign]

    def note_tokens(self, seq_id: int, now: float) -> None:
        """An update with tokens of a sequence: its reader begins to read, unless it had before."""
        sequence = self.sim.core._sequences.get(seq_id)
        if sequence is not None and seq_id not in self._reports:
            self._begin(sequence, now)

    def check_plan(self, plan: StepPlan, decodes: list[Sequence], admitted: list[Sequence]) -> None:
        """Check who decodes, and that no admission goes before a hungry decode; rows of batches by themselves."""
        laws = self.sim.laws
        held = [s for s in decodes if self.is_held(s)]
        planned = {chunk.seq_id for chunk in plan.chunks}
        waited_for = laws.sharing.writers_waited_for()  # each gives the block that another one waits for
        self.beyond |= {s.seq_id for s in held if s.seq_id in planned & waited_for.keys()}
        moving = [s.seq_id for s in held if s.seq_id in planned - waited_for.keys()]
        assert not moving, f"22: {moving[0]} stands at its lead, and decodes"
        lent = laws.sharing.lent_rows(plan)
        rows = {s.seq_id for s in laws.sim.core.scheduler.running if is_row(s)} - lent
        first = [chunk for chunk in plan.chunks if chunk.seq_id not in rows]
        num_seats, num_tokens = self.sim.shape.max_num_seqs, laws.budget_of_plan
        for of_batch, chunks in ((False, first), (True, [chunk for chunk in plan.chunks if chunk.seq_id in rows])):
            group = Group(
                running=[s for s in laws.stayed() if is_row(s) is of_batch and s.seq_id not in lent and s not in held],
                decodes=[s for s in decodes if is_row(s) is of_batch and s.seq_id not in lent and s not in held],
                admitted=[s for s in admitted if is_row(s) is of_batch and s.seq_id not in lent],
                planned={chunk.seq_id for chunk in chunks},
                num_seats=num_seats,
                is_spent=sum(len(chunk.token_ids) for chunk in chunks) >= num_tokens,
                is_last=of_batch,
            )
            self._check_group(group)
            num_seats -= len(chunks)
            num_tokens -= sum(len(chunk.token_ids) for chunk in chunks)

    def _check_group(self, group: Group) -> None:
        sim, laws = self.sim, self.sim.laws
        now, num_seats, planned, decodes = laws.started_at, group.num_seats, group.planned, group.decodes
        left_out = [s for s in decodes if s.seq_id not in planned and not laws.flights.waits_for_token(s)]
        hungry = {s.seq_id: a for s in decodes if (a := self.ahead(s, now)) < sim.shape.hungry_seconds}
        starved = [s for s in left_out if s.seq_id in hungry]
        prompts = [s for s in (*group.running, *group.admitted) if laws.flights.num_unplanned(s) > 1]
        if group.admitted:
            one = group.admitted[0].seq_id
            assert not starved, f"37: {one} is admitted before {starved[0].seq_id}, which is hungry"
            assert len(hungry) + len(prompts) <= num_seats, (
                "37: admitted beside as many hungry sequences as a step holds"
            )
        num_decodes = sum(s.seq_id in planned for s in decodes)
        num_begun = len(group.running) - len(decodes)
        has_prompts = any(s in group.running and not laws.sharing.waits(s) for s in prompts)
        if has_prompts and not group.is_last:
            assert len(planned & hungry.keys()) < num_seats, "10: no seat is kept for prompts that have begun"
        room = num_seats - min(num_begun, max(1, num_seats // 2))
        if starved and not group.is_spent:
            assert num_decodes >= room, f"10: {starved[0].seq_id} is hungry, and left out of {num_decodes} decodes"
        if starved:
            least = min(hungry[s.seq_id] for s in starved)
            # A writer decodes in the turn, and in the seat, of the prompt that waits for its block.
            own = planned & hungry.keys() - laws.sharing.writers_waited_for().keys()
            others = [seq_id for seq_id in own if hungry[seq_id] > least + 1e-9]
            assert not others, f"10: {others[0]} decodes before a hungrier one"
        is_full = len(planned) >= num_seats or group.is_spent
        for sequence in left_out:
            # A hungry one makes room for itself, but not in a seat that was kept for prompts and is left over.
            is_short = sim.core.pool.num_free < len(sim.shape.windows) and (
                sequence.seq_id not in hungry or num_decodes >= room
            )
            assert is_full or is_short, f"10: {sequence.seq_id} could decode and was left out"
        if not group.is_last:
            self._count(hungry, starved, left_out)

    def after_step(self) -> None:
        """No pace has fallen without a cause."""
        assert not self._wrong, self._wrong[0]

    def _count(self, hungry: dict[int, float], starved: list[Sequence], left_out: list[Sequence]) -> None:
        """A hungry sequence is passed by hungrier ones only, and these are fed with each step: there is a bound."""
        self.pauses += len(left_out)
        ids = {s.seq_id for s in starved}
        for seq_id in set(self._out) - ids:
            del self._out[seq_id], self._allowed[seq_id]
        for seq_id in ids:
            self._out[seq_id] += 1
            paces = [self.sim.core._sequences[one].reader.pace for one in hungry]
            behind = hungry[seq_id] - min(hungry.values())
            bound = len(paces) * (max(paces) * behind + 2) + 40  # prompts that have begun may take half of each step
            self._allowed[seq_id] = max(bound, self._allowed.get(seq_id, 0.0))
            self.longest = max(self.longest, self._out[seq_id])
            assert self._out[seq_id] <= self._allowed[seq_id], f"38: {seq_id} starves: {self._out[seq_id]} steps"

    def is_held(self, sequence: Sequence) -> bool:
        """Whether a sequence stands at its lead, with the token in flight."""
        report, chunk = self._reports.get(sequence.seq_id), self.sim.laws.flights.chunk_of(sequence)
        if report is None or report.num_read is None:
            return False
        num_tokens = sequence.num_output_tokens + (chunk is not None and bool(chunk.samples))
        return num_tokens - report.num_read >= self.sim.shape.lead_tokens

    def rests(self, sequence: Sequence) -> bool:
        """Whether it is held, lacks one token only, and nothing of it is in flight."""
        is_still = sequence.state is State.RUNNING and self.sim.laws.flights.chunk_of(sequence) is None
        return is_still and self.sim.laws.flights.num_unplanned(sequence) == 1 and self.is_held(sequence)

    def still_seconds(self, sequence: Sequence, now: float) -> float:
        """For how long its reader has not moved."""
        return now - self._reports[sequence.seq_id].at

    def ahead(self, sequence: Sequence, now: float) -> float:
        """Return how far a sequence was ahead of its reader when the step began."""
        report, chunk = self._reports.get(sequence.seq_id), self.sim.laws.flights.chunk_of(sequence)
        if report is None:
            return 0.0
        num_tokens = sequence.num_output_tokens + (chunk is not None and bool(chunk.samples))
        return report.ahead(num_tokens, sequence.reader.pace, now)

    def _begin(self, sequence: Sequence, now: float) -> None:
        num_read, num_tokens = sequence.reader.num_read, sequence.num_output_tokens
        self._reports[sequence.seq_id] = Report(num_read, num_tokens, now, sequence.reader.pace, is_away=False)

    def _note_report(
        self, sequence: Sequence, before: Report, num_read: int | None, now: float, *, is_away: bool
    ) -> None:
        pace, has_waited = sequence.reader.pace, num_read is not None and num_read > before.num_tokens
        if has_waited and pace < before.pace - 1e-9:
            self._wrong.append(f"39: {sequence.seq_id} waited for tokens, and its pace falls to {pace}")
        if (num_read, is_away) != (before.num_read, before.is_away):
            report = Report(num_read, sequence.num_output_tokens, now, pace, is_away=is_away)
            self._reports[sequence.seq_id] = report
