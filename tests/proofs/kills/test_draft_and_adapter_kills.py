"""The engine process is killed under sixteen streams while a draft model proposes, adapters answer, or both.

The model is the demo model, with layers that change little: the demo model itself drafts for it. Readers have what an
undisturbed engine without a draft model gives, to the token, and all memory is given back.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from streamserve.clients.adapter import AdapterClient
from streamserve.clients.process.config import LaunchConfig
from streamserve.engine.config import EngineConfig, ModelConfig, Policy
from streamserve.protocol.requests import GenerateRequest, Message, SamplingParams
from tests.proofs.scale import IS_SOAK
from tests.proofs.support.killing import kill_under_readers, signals_of
from tests.proofs.support.pairs import PATIENT, Answer, whole_answer
from tests.support.engines.engine_processes import connected, end_engine, spec_in

pytestmark = [
    pytest.mark.timeout(7200 if IS_SOAK else 400),
    pytest.mark.sampled("the demo model at temperature 1, by a new seed each time"),
]

NUM_KILLS = 100 if IS_SOAK else 3  # an engine loads for seconds
NUM_REQUESTS = 12 if IS_SOAK else 9
MOST_TOKENS = 600 if IS_SOAK else 300  # shown between two kills, at most
ENGINE = EngineConfig(
    block_size=8,
    num_blocks=1024,
    max_num_seqs=4,
    max_model_len=1024,
    lead_tokens=64,
    classes=PATIENT,  # sixteen streams for four seats
    policy=Policy(stalled_seconds=0.0),
)
TIRELESS = 10**9  # however often it is killed, it is started again
ADAPTERS = {"legal": ("q_proj", "v_proj", "down_proj"), "style": ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj")}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ModelConfig]:
    """Return a function to the config of the model, with what it has beside itself."""
    pytest.importorskip("torch", reason="needs the engine extra: pip install 'streamserve[engine]'")
    from project.settings import HELPDESK
    from tests.support.models.adapters import save_adapter
    from tests.support.models.deeper import save_deeper

    folder = tmp_path_factory.mktemp("models")
    deeper = save_deeper(folder / "deeper", HELPDESK)
    adapters = {
        name: str(save_adapter(folder / name, HELPDESK, targets, seed=seed, lora_alpha=0.3))
        for seed, (name, targets) in enumerate(ADAPTERS.items())
    }

    def config_of(*, has_draft: bool, has_adapters: bool) -> ModelConfig:
        return ModelConfig(
            alias="echo",
            path=str(deeper),
            dtype="float32",
            parity_probe=False,
            num_threads=1,
            draft=str(HELPDESK) if has_draft else "",
            adapters=adapters if has_adapters else {},
        )

    return config_of


def requests_of(rng: random.Random, names: list[str]) -> list[GenerateRequest]:
    """Questions to the model and its adapters in turn; greedy and drawn, with log-probabilities, stops, choices."""
    from benchmarks.demo_model.questions import QUESTIONS

    return [
        GenerateRequest(
            model=names[number % len(names)],
            messages=(Message(role="user", content=question.text),),
            sampling=SamplingParams(
                temperature=(0.0, 0.8, 1.0)[number // len(names) % 3],
                seed=rng.randrange(2**40),
                max_tokens=rng.randint(50, 150),
                stop=(" the", "account") if number % 4 == 1 else (),
                min_tokens=10,
                logprobs=2 if number % 5 == 2 else None,
                repetition_penalty=1.2 if number % 7 == 3 else 1.0,
                ignore_eos=number % 4 > 0,
            ),
            n=2 if number % 6 == 4 else 1,
        )
        for number, question in enumerate(QUESTIONS[:NUM_REQUESTS])
    ]


async def undisturbed(spec: LaunchConfig, requests: list[GenerateRequest]) -> list[Answer]:
    """Return the answers of an engine that proposes nothing, one after the other."""
    spec = replace(spec, engine=replace(spec.engine, speculation="off"), model=replace(spec.model, draft=""))
    async with connected(spec) as client:
        admits = {client.alias: client.generate}
        admits |= {name: AdapterClient(name, client).generate for name in spec.model.adapters}
        answers = [await whole_answer(admits[request.model], request) for request in requests]
    end_engine(spec)
    return answers


@pytest.mark.parametrize(
    ("has_draft", "has_adapters"),
    [(True, False), (False, True), (True, True)],
    ids=["a draft model", "adapters", "both"],
)
async def test_kills(folder: Path, model: Callable[..., ModelConfig], *, has_draft: bool, has_adapters: bool) -> None:
    """100 times: every answer is that of an undisturbed engine without a draft model; nothing shown is lost."""
    seed = int(os.environ.get("KILLS_SEED") or random.randrange(10**6))
    print(f"\nKILLS_SEED={seed}")
    rng = random.Random(seed)
    config = model(has_draft=has_draft, has_adapters=has_adapters)
    spec = spec_in(folder, model=config, engine=ENGINE, max_failures=TIRELESS, hang_seconds=5.0)
    requests = requests_of(rng, ["echo", *config.adapters])
    right = await undisturbed(spec, requests)
    killer = await kill_under_readers(spec, requests, signals_of(NUM_KILLS, rng), rng, MOST_TOKENS, right)
    what = " and ".join(["a draft model"] * has_draft + ["two adapters"] * has_adapters)
    print(
        f"kills with {what}: {killer.report(spec.hang_seconds)}; "
        f"{killer.num_drafted:,} tokens of the draft model were accepted"
    )
    assert killer.num_lost == NUM_KILLS
    assert (killer.num_drafted > 0) == has_draft
