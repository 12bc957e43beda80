"""The events of a random run: a shape of engine, a mix of events, and then one event after another.

Each seed has its own mix: some runs are full of parks, and others have none (swarm testing, Groce et al. 2012).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from streamserve.protocol.requests import SamplingParams
from tests.sim.asked import STEMS, Asked, Shape
from tests.sim.simulation import Simulation

_LONG = SamplingParams(temperature=0.0, seed=0, max_tokens=40, ignore_eos=True)
Act = Callable[[random.Random, Simulation, Asked], None]


def choose_shape(rng: random.Random) -> Shape:
    """Return an engine so small that every resource runs short in it."""
    block_size = rng.choice([2, 4, 4, 8])
    max_num_seqs = rng.choice([2, 4, 4, 6])
    return Shape(
        num_blocks=rng.choice([26, 30, 44, 80]) * 4 // block_size,
        block_size=block_size,
        budget=rng.choice([max_num_seqs, 16, 16, 32]),
        max_num_seqs=max_num_seqs,
        prefill_chunk=rng.choice([1, 6, 16]),
        max_step_seconds=rng.choice([12, 20, 1024]) / 1024,
        prefix_caching=rng.random() < 0.85,
        overlap=rng.random() < 0.5,
        max_model_len=rng.choice([96, 96, 48]),
        lead_tokens=rng.choice([4, 12, 1000]),
        hungry_seconds=rng.choice([0.02, 0.1, 0.5, 1e9]),
        max_admitted=rng.choice([None, None, 3, 8]),
        min_ahead_seconds=rng.choice([0.1, 0.25, 100.0]),
        max_debt_seconds=rng.choice([0.01, 0.1, 1.0]),
        known_len=rng.choice([None, None, 2]),
    )


def with_windows(rng: random.Random, shape: Shape) -> Shape:
    """Return the shape for a model some of whose layers look back only so far, with as many blocks for each group."""
    windows = rng.choice([(5,), (17,), (None, 6), (None, 10, 10), (None, 4, 23), (3, 9)])
    return replace(shape, windows=windows, num_blocks=shape.num_blocks * len(windows))


def hold_many(rng: random.Random, shape: Shape) -> Simulation:
    """Return a run that begins with several answers at their leads, and one that grows into the last of the memory."""
    num_blocks = rng.choice([26, 30]) * 4 // shape.block_size
    sim = Simulation(
        replace(shape, num_blocks=num_blocks * len(shape.windows), lead_tokens=4, known_len=1, max_admitted=None)
    )
    kinds = rng.choice([["chat"] * 4, ["batch"] * 4, ["chat"] * 3 + ["batch"]])
    for index, kind in enumerate(kinds):
        reads = rng.choice([0.0, 0.1, 0.3]) if index else None
        prompt = STEMS[index % 2][: rng.randint(9, 20)]
        sim.ask(prompt, _LONG, tenant="abcd"[index], latency_class=kind, reads=reads)
    for _ in range(rng.randint(5, 50)):
        sim.step()
    return sim


def wait_behind(rng: random.Random, shape: Shape) -> Simulation:
    """Return a run in which a row of a batch waits for long, and a chat until it is late, for two answers to end."""
    num_blocks = 30 * 4 // shape.block_size
    sim = Simulation(
        replace(shape, num_blocks=num_blocks * len(shape.windows), max_num_seqs=2, max_admitted=None, known_len=1)
    )
    for kind in ("chat", "chat", "batch"):
        sim.ask(STEMS[0][:4], _LONG, latency_class=kind)
    for _ in range(rng.randint(6, 14)):
        sim.step()
    sim.ask(STEMS[0][:4], _LONG)
    for _ in range(40):
        sim.step()
    return sim


def have_few_places(_: random.Random, shape: Shape) -> Simulation:
    """Return a run with memory and seats for more than may be admitted."""
    return Simulation(replace(shape, num_blocks=80 * 4 // shape.block_size * len(shape.windows), max_admitted=2))


def return_ahead(_: random.Random, shape: Shape) -> Simulation:
    """Return a run in which an answer far ahead of its reader comes back, just when a long prompt lacks memory."""
    num_blocks = 26 * 4 // shape.block_size
    plenty = {"max_num_seqs": 4, "budget": 32, "lead_tokens": 1000, "max_admitted": None, "max_model_len": 96}
    sim = Simulation(
        replace(shape, num_blocks=num_blocks * len(shape.windows), known_len=1, min_ahead_seconds=0.1, **plenty)
    )
    ahead = sim.ask(STEMS[0][:20], _LONG, tenant="a", reads=0.0)
    sim.ask(STEMS[0][:20], _LONG, tenant="b")
    for _ in range(24):
        sim.step()
    sim.leave(ahead)
    sim.ask(STEMS[0][:38], _LONG, tenant="c")
    for _ in range(8):
        sim.step()
    return sim


@dataclass(frozen=True, slots=True)
class Mix:
    """How often each event happens, in one run."""

    asks: float
    acts: float
    meanwhile: float
    readers: float
    tenants: str
    adapters: tuple[str, ...]
    kinds: tuple[str, ...]


def choose_mix(rng: random.Random) -> Mix:
    """Return a mix: some kinds of events happen often, and others never."""
    kinds = rng.sample(sorted(ACTS), k=rng.randint(2, len(ACTS)))
    return Mix(
        asks=rng.choice([0.05, 0.12, 0.2]),
        acts=rng.choice([0.05, 0.15, 0.3]),
        meanwhile=rng.choice([0.0, 0.5]),
        readers=rng.choice([0.0, 0.5, 1.0]),
        tenants=rng.choice(["a", "ab", "aaaab", "abcd"]),
        adapters=rng.choice([("",), ("",), ("", "legal"), ("legal", "style")]),
        kinds=tuple(kinds),
    )


def ask(rng: random.Random, sim: Simulation, mix: Mix) -> None:
    """Submit a request; or several answers to one prompt, or the same prompt in other classes."""
    prompt = rng.choice(STEMS)
    prompt = prompt[: rng.randint(1, len(prompt))]
    sampling = SamplingParams(
        temperature=rng.choice([0.0, 1.0]),
        seed=rng.randrange(3),
        max_tokens=rng.randint(0, 40),
        min_tokens=rng.choice([0, 0, 20]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.5]),
        stop_token_ids=rng.choice([(), (3, 4, 5)]),
        ignore_eos=rng.random() < 0.5,
        logprobs=rng.choice([None, None, 0]),
    )
    tenant, num_public = rng.choice(mix.tenants), rng.choice([0, 0, 8, 9])
    for number in range(rng.choice([1, 1, 1, 4])):
        sim.ask(
            prompt[: len(prompt) - rng.choice([0, 0, number])] or prompt,
            replace(sampling, seed=sampling.seed + number),
            tenant=tenant,
            num_public=num_public,
            latency_class=rng.choice(["chat", "chat", "document", "batch"]),
            timeout=rng.choice([None] * 9 + [20 * 8 / 1024]),
            reads=rng.choice([0.0, 0.2, 1.0, 3.0]) if rng.random() < mix.readers else None,
            adapter=rng.choice(mix.adapters),
        )


def _tighten(rng: random.Random, sim: Simulation, asked: Asked) -> None:
    sim.tighten(rng.choice([0, 1, 4, 8]), rng.choice([1, 2, 3, 6]), is_late=rng.random() < 0.5)


def _pause(rng: random.Random, sim: Simulation, asked: Asked) -> None:
    (sim.resume if sim.is_paused else sim.pause)()


ACTS: dict[str, Act] = {
    "abort": lambda rng, sim, asked: sim.abort(asked),
    "leave": lambda rng, sim, asked: sim.leave(asked, rng.choice([0, 0, 3, 30])),
    "stop": lambda rng, sim, asked: sim.stop(asked),
    "fail": lambda rng, sim, asked: sim.fail(asked),
    "preempt": lambda rng, sim, asked: sim.preempt(asked),
    "read": lambda rng, sim, asked: sim.set_rate(asked, rng.choice([0.0, 0.2, 3.0])),
    "unknown": lambda rng, sim, asked: sim.abort_unknown(),
    "tighten": _tighten,
    "pause": _pause,
    "crash": lambda rng, sim, asked: sim.crash(),
    "corrupt": lambda rng, sim, asked: sim.corrupt(),
    "wait": lambda rng, sim, asked: sim.wait(rng.choice([0.125, 2.0, 6.0])),
}
# More often, and no other event would happen.
RARE = {"corrupt": 0.1, "crash": 0.2, "pause": 0.3, "wait": 0.3}


def happen(rng: random.Random, sim: Simulation, mix: Mix) -> None:
    """Choose one event or none, now or while the next step runs."""
    if rng.random() < mix.asks:
        ask(rng, sim, mix)
    if rng.random() >= mix.acts or not sim.open():
        return
    kind, asked = rng.choice(mix.kinds), rng.choice(sim.open())
    if rng.random() >= RARE.get(kind, 1.0):
        return
    if rng.random() < mix.meanwhile:
        sim.defer(lambda sim, asked: ACTS[kind](rng, sim, asked), asked)
    else:
        ACTS[kind](rng, sim, asked)
