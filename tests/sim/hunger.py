"""`HungerLaws`: how far ahead readers are, from a list of their reports, and who decodes because of that."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from streamserve.engine.plan import StepPlan
from streamserve.engine.policy.reader import MIN_PACE, REPORT_TOKENS
from streamserve.engine.sequence import Sequence, State

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


class HungerLaws:
    """`pauses`: how often a sequence that could decode was left out. `longest`: for how many steps a hungry one was."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.pauses = self.longest = 0
        self._reports: dict[int, Report] = {}
        self._out: Counter[int] = Counter()
        self._allowed: dict[int, float] = {}
        self._wrong: list[str] = []

    def watch(self) -> None:
        """Record what readers report to this core, and when answers come back to it."""
        output, scheduler = self.sim.core._output, self.sim.core.scheduler
        reader_at, add = output.reader_at, scheduler.add

        def noted_add(sequence: Sequence, now: float) -> None:
            add(sequence, now)
            if sequence.num_output_tokens:
                self._begin(sequence, now)

        def noted(seq_id: int, num_tokens: int | None, now: float, *, is_away: bool = False) -> None:
            sequence, before = output.sequences.get(seq_id), self._reports.get(seq_id)
            reader_at(seq_id, num_tokens, now, is_away=is_away)
            if sequence is not None and before is not None:
                self._note_report(sequence, before, num_tokens, now, is_away=is_away)

        scheduler.add = noted_add  # type: ignore[method-assign]
        output.reader_at = noted  # type: ignore[method-assign]

    def note_tokens(self, seq_id: int, now: float) -> None:
        """An update with tokens of a sequence: its reader begins to read, unless it had before."""
        sequence = self.sim.core._sequences.get(seq_id)
        if sequence is not None and seq_id not in self._reports:
            self._begin(sequence, now)

    def check_plan(self, plan: StepPlan, decodes: list[Sequence], admitted: list[Sequence]) -> None:
        """Check who decodes, and that no admission goes before a hungry decode."""
        sim, laws = self.sim, self.sim.laws
        planned = {chunk.seq_id for chunk in plan.chunks}
        now, most = laws.started_at, sim.shape.max_num_seqs
        held = [s for s in decodes if self.is_held(s)]
        moving = [s.seq_id for s in held if s.seq_id in planned]
        assert not moving, f"22: {moving[0]} stands at its lead, and decodes"
        decodes = [s for s in decodes if s not in held]
        left_out = [s for s in decodes if s.seq_id not in planned and not laws.flights.waits_for_token(s)]
        hungry = {s.seq_id: a for s in decodes if (a := self.ahead(s, now)) < sim.shape.hungry_seconds}
        starved = [s for s in left_out if s.seq_id in hungry]
        if admitted:
            assert not starved, f"37: {admitted[0].seq_id} is admitted before {starved[0].seq_id}, which is hungry"
            num_prompts = sum(laws.flights.num_unplanned(s) > 1 for s in sim.core.scheduler.running)
            assert len(hungry) + num_prompts <= most, "37: admitted beside as many hungry sequences as a step holds"
        num_decodes = sum(s.seq_id in planned for s in decodes)
        num_begun = len(laws.stayed()) - len(decodes) - len(held)
        has_prompts = any(laws.flights.num_unplanned(s) > 1 and not laws.sharing.waits(s) for s in laws.stayed())
        assert not has_prompts or len(planned & hungry.keys()) < most, "10: no seat is kept for prompts that have begun"
        if starved:
            room = most - min(num_begun, max(1, most // 2))
            assert num_decodes >= room, f"10: {starved[0].seq_id} is hungry, and left out of {num_decodes} decodes"
            least = min(hungry[s.seq_id] for s in starved)
            others = [seq_id for seq_id in planned & hungry.keys() if hungry[seq_id] > least + 1e-9]
            assert not others, f"10: {others[0]} decodes before a hungrier one"
        is_full = len(plan.chunks) >= most or plan.num_tokens >= laws.budget_of_plan
        for sequence in left_out:
            is_short = sim.core.pool.num_free == 0 and sequence.seq_id not in hungry
            assert is_full or is_short, f"10: {sequence.seq_id} could decode and was left out"
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
        num_tokens = sequence.num_output_tokens + (chunk is not None and chunk.sample is not None)
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
        num_tokens = sequence.num_output_tokens + (chunk is not None and chunk.sample is not None)
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
