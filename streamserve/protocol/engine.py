"""What an engine reports. Of one request: `Accepted` when it takes it, `Park` when it ends it early. Of itself:
`ModelDescription`, and its counts, `CoreStats` and `EngineStats`. Values, and `Losses`, which counts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from streamserve.protocol.history import Point

# An answer whose step has ended its engine so often, without a new token in between, is a suspect: its next steps hold
# nothing else, so that the next loss shows whether it was the cause.
SUSPECT_LOSSES = 2
# A request that loses its engine this often may itself end the engine. A suspect that was alone in the step that
# ended the engine is known to end it.
_MAX_LOSSES = 5
HOPELESS = "The engine failed repeatedly on this answer. Try again."


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """What acceptance fixes: sizes, the seed and the clamped max_tokens. Cached tokens are known at first schedule.

    `has_token_ids` False: a server elsewhere makes the answer, and gives its text without ids.
    `needs`: what a release that continues the answer has to know, beside the request's own.
    `may_repeat` False: what continues an answer gives only events that were not shown, as a pipeline's run does.
    """

    num_prompt_tokens: int
    max_tokens: int
    seed: int
    queue_position: int = 0
    has_token_ids: bool = True
    needs: tuple[str, ...] = ()
    may_repeat: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Park:
    """The engine has ended a sequence early and freed it; a request with the tokens so far continues it. When to ask:

    - "lead": its reader is too far behind: when no more than `resume_at_lead` tokens are unread
    - "ahead": its reader has enough to read, and another sequence needed the room: after `resume_seconds`
    - "paused": an operator paused the engine; "lost": the engine is gone: at once, and again until it is accepted

    Of a lost engine: `is_counted` is False where it ended in good order, or in a step that did not hold this answer;
    `was_alone` is True where that step held this answer only.
    """

    reason: str
    resume_at_lead: int = 0
    resume_seconds: float = 0.0
    is_counted: bool = True
    was_alone: bool = False


@dataclass(slots=True, eq=False)
class Losses:
    """How often an answer has lost its engine since its last new token: in a step with it, or in none."""

    num_losses: int = 0
    _num_tokens: int = 0
    _was_alone: bool = False

    def note(self, park: Park, num_tokens: int) -> None:
        """Note a park of any kind, at so many tokens of the answer."""
        if num_tokens > self._num_tokens:
            self.num_losses = 0
        self._num_tokens = num_tokens
        self.num_losses += park.reason == "lost" and park.is_counted
        self._was_alone = park.was_alone

    @property
    def is_hopeless(self) -> bool:
        """Whether the engine was lost too often without a new token, or by this answer alone."""
        is_guilty = self._was_alone and self.num_losses > SUSPECT_LOSSES
        return is_guilty or self.num_losses >= _MAX_LOSSES


# A reader that waits for longer notices.
LATE_SECONDS = 1.0
# What a client measures of its engine: the rate is of the last seconds, percentiles are of the last answers.
RATE_SECONDS, NUM_RECENT = 5.0, 256
ANSWERS, EMBEDS = "generation", "embedding"  # kinds of models
# Stages of a model whose engine process does not run, and that no web process starts; whose engine waits for the memory
# of other engines (its place in the queue follows); and that takes more memory than all engines have.
ABSENT, AWAITS_MEMORY, TOO_LARGE = "absent", "waiting for memory", "model_too_large"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """What a model is and how far its engine has come.

    `state`: "idle" (not asked for yet), "asleep" (it takes no memory, and is loaded when it is asked), "loading",
    "ready", "paused" and "draining" (by an operator: it takes nothing new), "failed". `stage`, `fraction` (0 to 1),
    bytes and `elapsed_seconds` describe loading; `message` names the failure and the way out. `linears` names what
    computes its linear layers. `was_ready`: there was an engine before, so that another engine can be expected. `kind`:
    what it gives, ANSWERS or EMBEDS; of an embedding model, `dimensions` are its vectors'. `on_demand`: its engine
    sleeps, and is loaded when it is asked. `parent`: of an adapter, the model that it changes.
    """

    alias: str
    state: str
    stage: str = ""
    fraction: float = 0.0
    loaded_bytes: int = 0
    total_bytes: int = 0
    elapsed_seconds: float = 0.0
    message: str = ""
    max_model_len: int = 0
    has_chat_template: bool = False
    dtype: str = ""
    device: str = ""
    linears: str = ""
    num_parameters: int = 0
    created: int = 0
    was_ready: bool = False
    kind: str = ANSWERS
    dimensions: int = 0
    on_demand: bool = False
    parent: str = ""

    @property
    def is_loading(self) -> bool:
        """Whether its engine is being loaded, or begins to be when it is asked."""
        return self.state in ("idle", "asleep", "loading")

    @property
    def is_served(self) -> bool:
        """Whether it answers now, or is loaded when it is asked."""
        return self.state in ("ready", "asleep") or (self.on_demand and self.is_loading)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreStats:
    """Counts after the last step. Block counts exclude the null block: used + cached + free = total.

    `blocks_used` are held by running sequences; `blocks_cached` are reclaimable and hold reusable prefixes.
    `queued_tokens` are those that waiting sequences still have to compute, `queued_seconds` the time for them by the
    step-time model (0 until it is fitted). `parks` counts sequences that the engine itself parked, `out_of_memory` and
    `quarantines` steps that ended so; `token_budget` is what a step may compute now. `grammar_waits` counts how often a
    sequence with a grammar was left out of an overlapped step, of the answers that have ended.

    The readers of running answers that have begun, at the last look: `readers_away` look at something else,
    `readers_late` have waited for their next token for more than `LATE_SECONDS`, `readers_hungry` run out of tokens
    soon, `readers_ahead` do not; those that are not away read `readers_pace` tokens a second together. `rows` are of
    batches, and have no readers. `expired` counts requests that waited too long for their first step. Of all
    `computed_tokens`, `recomputed_tokens` had been computed before a preemption or a park. The engine worked for
    `busy_seconds` so far. By latency class: `proposed_tokens` came after another token of a step, of which
    `accepted_tokens` were accepted; of these `drafted_tokens` and `accepted_drafts` are a draft model's.
    """

    running: int = 0
    waiting: int = 0
    blocks_total: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    blocks_free: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    unknown_ids: int = 0
    queued_tokens: int = 0
    queued_seconds: float = 0.0
    parks: int = 0
    out_of_memory: int = 0
    quarantines: int = 0
    token_budget: int = 0
    is_paused: bool = False
    grammar_waits: int = 0
    readers_away: int = 0
    readers_late: int = 0
    readers_hungry: int = 0
    readers_ahead: int = 0
    readers_pace: float = 0.0
    rows: int = 0
    expired: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    busy_seconds: float = 0.0
    proposed_tokens: dict[str, int] = field(default_factory=dict)
    accepted_tokens: dict[str, int] = field(default_factory=dict)
    drafted_tokens: dict[str, int] = field(default_factory=dict)
    accepted_drafts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats(CoreStats):
    """Live counts of one engine: the core's, and what its client has measured in the last seconds.

    `lost_engines`: how many died, hung or did not start since this process began. `refused` counts requests that were
    refused at once, because they would have waited too long. `classes` has for each latency class its budgets
    (`ttft_budget`, and `total_budget`, where it is set) and what the last answers took: `num_answers`, `ttft_p50`,
    `ttft_p95`, `total_p50`, `total_p95` in seconds, and `in_time`, the share within both budgets; `refused` counts its
    requests that were refused at once or had waited too long. `upstreams` has the figures of each server of a remote
    model, by the names of their metrics (clients/remote/metrics.py). An embedding model counts what it has computed:
    `embedded_requests` and their `embedded_inputs`; its `rows` are inputs that wait.

    `reported_at` is the wall time of an engine process's report (0: there is none, the counts are of now), and `past`
    the points that it had when this process connected to it.
    """

    tokens_per_second: float = 0.0
    latency: dict[str, float] = field(default_factory=dict)
    lost_engines: int = 0
    refused: int = 0
    classes: dict[str, dict[str, float]] = field(default_factory=dict)
    upstreams: dict[str, dict[str, float]] = field(default_factory=dict)
    embedded_requests: int = 0
    embedded_inputs: int = 0
    reported_at: float = 0.0
    past: tuple[Point, ...] = ()

    def point(self, now: float) -> Point:
        """Return what a history keeps of these counts; `now` is the wall time of counts that are of now."""
        counts = {name: getattr(self, name) for name in _KEPT}
        late = {name: one["ttft_p95"] for name, one in self.classes.items() if "ttft_p95" in one}
        return Point(at=self.reported_at or now, ttft_p95=late, **counts)


_KEPT = tuple(name for name in Point.__struct_fields__ if name in EngineStats.__dataclass_fields__)
