"""What the live page's figures mean: a level and words for each model's panels, and the page's headline. Pure.

level    "ok" · "warn": something is beyond its threshold · "bad": readers wait, or requests were refused ·
         "idle": nothing is asked
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from streamserve.protocol.alerts import WINDOW_MINUTES
from streamserve.protocol.engine import EngineStats, ModelDescription
from streamserve.protocol.history import Point, last_seconds, load, of_one_engine, shares
from streamserve.protocol.requests import BATCH, PREFILL_ONLY
from streamserve.web.live.recent import Recent, distance, sentence
from streamserve.web.words import in_words

# Of the blocks of the KV cache, held by running answers: above it the next answers wait for memory.
MEMORY_LIMIT = 0.9
# What was refused counts for so long.
_REFUSED_SECONDS = 60
# More than this share of the work computes again what was dropped.
_MUCH_RECOMPUTED = 0.1
_LEVELS = ("idle", "ok", "warn", "bad")


@dataclass(frozen=True, slots=True)
class Verdict:
    """A level, what it is in a sentence, and what it means; `place` of `model` is where to look (alerts.py)."""

    level: str
    words: str
    meaning: str = ""
    model: str = ""
    place: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What one look has shown of a model: its state, its engine's report, the report's history, and the last minutes of
    its answers on this host."""

    description: ModelDescription
    stats: EngineStats
    points: Sequence[Point] = ()
    recent: Recent = field(default_factory=lambda: Recent(model=""))

    @property
    def knows_readers(self) -> bool:
        """Whether an engine of ours reports them; a server elsewhere does not."""
        return not self.stats.upstreams

    @property
    def num_readers(self) -> int:
        """How many readers have the first token of a running answer."""
        stats = self.stats
        return stats.readers_late + stats.readers_hungry + stats.readers_ahead + stats.readers_away

    @property
    def num_waiting(self) -> int:
        """How many requests have no token yet, in the engine's batch or its queue."""
        stats = self.stats
        return stats.waiting + stats.running - (self.num_readers + stats.rows if self.knows_readers else stats.running)

    @property
    def num_refused(self) -> int:
        """How many requests were refused lately, at once or after they had waited too long."""
        points = last_seconds(of_one_engine(self.points), _REFUSED_SECONDS)
        return points[-1].refused + points[-1].expired - points[0].refused - points[0].expired if points else 0

    @property
    def load(self) -> float | None:
        """See `history.load`."""
        return load(self.points)

    @property
    def budgets(self) -> Mapping[str, float]:
        """The first-token budgets, in seconds, of the classes that readers wait for."""
        classes = self.stats.classes
        return {name: one["ttft_budget"] for name, one in classes.items() if name not in (BATCH, PREFILL_ONLY)}

    @property
    def queue_limit(self) -> float | None:
        """The shortest budget of the classes that had answers: a longer queue makes their first tokens late."""
        classes = self.stats.classes
        return min((self.budgets[name] for name in self.budgets if classes[name].get("num_answers")), default=None)


def headline(models: Mapping[str, Seen]) -> Verdict:
    """Return the page's headline: how the readers of all models are."""
    out = {alias: seen for alias, seen in models.items() if not seen.description.is_served}
    ready = [seen for alias, seen in models.items() if alias not in out]
    if not ready:
        return Verdict("bad" if _any_failed(out) else "warn", _out_of_use(out), _why_out(out))
    verdict = _of_readers(ready)
    if out:
        level = "bad" if _any_failed(out) else _worse("warn", verdict.level)
        return Verdict(level, f"{verdict.words}. {_out_of_use(out)}", verdict.meaning or _why_out(out))
    return verdict


def panels(seen: Seen) -> dict[str, Verdict]:
    """Return the verdicts of a model's panels."""
    return {
        "readers": _readers(seen),
        "latency": _latency(seen),
        "memory": _memory(seen),
        "queue": _queue(seen),
        "leaving": _leaving(seen),
    }


def _of_readers(models: Sequence[Seen]) -> Verdict:
    num_readers, num_late = _sum(models, "num_readers"), sum(seen.stats.readers_late for seen in models)
    num_waiting, num_refused = _sum(models, "num_waiting"), _sum(models, "num_refused")
    num_elsewhere = sum(seen.stats.running for seen in models if not seen.knows_readers)
    if num_late:
        worst = max((seen for seen in models if seen.stats.readers_late), key=lambda seen: seen.load or 0.0)
        return _late(num_late, num_readers, worst)
    queue = max((_queue(seen) for seen in models), key=lambda verdict: _LEVELS.index(verdict.level))
    words = f"{_count(num_readers, 'reader')}, {'all ' if num_readers > 1 else ''}served in time"
    if not num_readers:
        words = "No readers now"
    if num_elsewhere:
        words += f"; {_count(num_elsewhere, 'answer')} from a server elsewhere"
    if num_refused:
        meaning = "The machine is full, and serves well what it admits. More memory or a smaller model admits more."
        return Verdict("bad", f"{words}; {_count(num_refused, 'request')} refused in the last minute", meaning)
    if any(seen.recent.beyond for seen in models):
        return _beyond(models)
    if queue.level == "warn":
        meaning = "Their first tokens will be late. Whoever reads already goes first."
        return Verdict("warn", f"{words}; {_count(num_waiting, 'request')} waiting too long", meaning)
    if num_waiting:
        words += f"; {_count(num_waiting, 'request')} waiting for the first token"
    is_idle = not (num_readers or num_waiting or num_elsewhere)
    return Verdict("idle" if is_idle else "ok", words, "Nothing is asked of the models." if is_idle else "")


def _beyond(models: Sequence[Seen]) -> Verdict:
    """Return which figure is farthest beyond its threshold, and how many others are."""
    found = [(seen.recent.model, one) for seen in models for one in seen.recent.beyond]
    model, worst = max(found, key=lambda pair: distance(pair[1]))
    words = f"{model}: {sentence(worst)}" if len(models) > 1 else sentence(worst)
    if len(found) > 1:
        are_beyond = "is beyond its threshold" if len(found) == 2 else "are beyond their thresholds"
        words += f"; {_count(len(found) - 1, 'more figure')} {are_beyond}"
    return Verdict("warn", words, worst.rule.look, model, worst.rule.place)


def _leaving(seen: Seen) -> Verdict:
    recent = seen.recent
    if not (recent.num_answers or recent.num_disconnects or recent.num_resumes):
        return Verdict("idle", f"No answer has ended in the last {WINDOW_MINUTES} min.")
    answers = f"{_count(recent.num_answers, 'answer')} in the last {WINDOW_MINUTES} min"
    share = f" ({100 * recent.num_left / recent.num_answers:.0f} %)" if recent.num_left else ""
    left = f"{answers}: {recent.num_left} stopped or left{share}"
    connections, readers = _count(recent.num_disconnects, "connection"), _count(recent.num_resumes, "reader")
    rate = f" ({100 * recent.num_disconnects / recent.num_answers:.0f} per 100 answers)" if recent.num_answers else ""
    is_over = any(one.rule.place == "leaving" for one in recent.beyond)
    words = f"{left}. {connections} ended early{rate}, {readers} came back."
    return Verdict("warn" if is_over else "ok", words)


def _late(num_late: int, num_readers: int, worst: Seen) -> Verdict:
    """Return why readers wait: too much is read, too much is computed twice, or the engine was held up."""
    words = f"{num_late} of {_count(num_readers, 'reader')} late"
    ratio, times = worst.load, shares(worst.points)
    if ratio is not None and ratio > 1.05:
        way_out = "Lower MAX_NUM_SEQS, use a smaller model, or a faster machine."
        return Verdict("bad", f"{words}: they read {ratio:.1f} × what the engine can compute", way_out)
    if times is not None and times["recomputed"] > _MUCH_RECOMPUTED:
        share = f"{100 * times['recomputed']:.0f} %"
        way_out = "Memory is short: raise KV_CACHE_BYTES or MEMORY_SHARE."
        return Verdict("bad", f"{words}: {share} of the time the engine computes again what it had to drop", way_out)
    way_out = "The engine can compute what they read: it was held up, by a long prompt or by the machine."
    return Verdict("bad", f"{words}: they have waited over a second for their next token", way_out)


def _readers(seen: Seen) -> Verdict:
    if not seen.knows_readers:
        return Verdict("idle", "The server elsewhere does not report its readers.")
    stats, ratio = seen.stats, seen.load
    if not seen.num_readers:
        return Verdict("idle", "No readers now.")
    states = ("late", "hungry", "ahead", "away")
    words = ", ".join(f"{getattr(stats, f'readers_{state}')} {state}" for state in states) + "."
    # Above 1 without a late reader says nothing: how fast a reader reads that takes everything at once is not known.
    is_known = ratio is not None and (ratio <= 1.0 or stats.readers_late > 0)
    meaning = f"They read {ratio:.1f} × what the engine can compute." if is_known else ""
    return Verdict("bad" if stats.readers_late else "ok", words, meaning)


def _latency(seen: Seen) -> Verdict:
    known = {name: one for name, one in seen.stats.classes.items() if "ttft_p95" in one and name in seen.budgets}
    if not known:
        return Verdict("idle", "No answer has ended yet.")
    late = [name for name, one in known.items() if one["ttft_p95"] > one["ttft_budget"]]
    parts = [f"{name} {in_words(one['ttft_p95'])} of {in_words(one['ttft_budget'])}" for name, one in known.items()]
    return Verdict("warn" if late else "ok", f"{', '.join(parts)}.", "Over the budget." if late else "")


def _memory(seen: Seen) -> Verdict:
    stats = seen.stats
    if not stats.blocks_total:
        return Verdict("idle", "The server elsewhere does not report its memory.")
    used, cached, free = (
        f"{100 * num / stats.blocks_total:.0f} %" for num in (stats.blocks_used, stats.blocks_cached, stats.blocks_free)
    )
    is_full = stats.blocks_used >= MEMORY_LIMIT * stats.blocks_total
    meaning = "The next answers wait for memory: raise KV_CACHE_BYTES or MEMORY_SHARE." if is_full else ""
    return Verdict("warn" if is_full else "ok", f"{used} used, {cached} cached, {free} free.", meaning)


def _queue(seen: Seen) -> Verdict:
    stats, limit = seen.stats, seen.queue_limit
    if seen.num_refused:
        words = f"{stats.waiting} waiting, {_count(seen.num_refused, 'request')} refused in the last minute."
        return Verdict("bad", words, "They would have waited too long.")
    if not stats.waiting:
        return Verdict("idle", "Nothing waits.")
    words = f"{_count(stats.waiting, 'request')} waiting: {in_words(stats.queued_seconds)} of computing."
    is_long = limit is not None and stats.queued_seconds > limit
    return Verdict("warn" if is_long else "ok", words, "First tokens will be late." if is_long else "")


def _out_of_use(models: Mapping[str, Seen]) -> str:
    words = {"idle": "not loaded yet", "failed": "failed"}
    parts = [f"{alias} is {words.get(one.description.state, one.description.state)}" for alias, one in models.items()]
    text = "; ".join(part.replace(" is failed", " has failed") for part in parts)
    return text[:1].upper() + text[1:] if text else "No model"


def _why_out(models: Mapping[str, Seen]) -> str:
    return next((one.description.message for one in models.values() if one.description.message), "")


def _any_failed(models: Mapping[str, Seen]) -> bool:
    return any(one.description.state == "failed" for one in models.values())


def _worse(one: str, other: str) -> str:
    return max(one, other, key=_LEVELS.index)


def _sum(models: Sequence[Seen], name: str) -> int:
    return sum(int(getattr(seen, name)) for seen in models)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
