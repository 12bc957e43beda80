"""Layers with a window in a real model: what lies before the window is freed, and the tokens are transformers' own."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install streamserve[engine]")

from streamserve.engine.capacity import capacity, max_servable_tokens  # noqa: E402  (after the skip)
from streamserve.engine.config import EngineConfig, ModelConfig  # noqa: E402
from streamserve.engine.kv.groups import most_blocks, most_in_window  # noqa: E402
from streamserve.engine.model.kv_cache import LayerShape, bytes_per_block, groups_for, windows_of  # noqa: E402
from streamserve.engine.model.load.start import load_runner  # noqa: E402
from streamserve.engine.model.runner import ModelRunner  # noqa: E402
from streamserve.engine.sequence import Sequence  # noqa: E402
from tests.support.engines.cores import Drive, request, sampling  # noqa: E402
from tests.support.engines.runners import ProposingRunner  # noqa: E402
from tests.support.models.model_driver import TINY, prompts  # noqa: E402
from tests.support.models.tiny_models import MIXED_LAYERS, VOCAB_SIZE, build_model, save_model  # noqa: E402

BLOCK = 4
STEP = 16  # tokens
NUM_NEW = 60
LONG = sampling(max_tokens=NUM_NEW, temperature=0.0)
MODELS: dict[str, tuple[dict[str, Any], tuple[int | None, ...]]] = {
    "mistral": ({}, (8,)),
    "phi3": ({}, (16,)),
    "gemma2": ({}, (None, 8)),
    "gemma3_text": (
        {"num_hidden_layers": 6, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]},
        (None, *[8] * 5),
    ),
    "gpt_oss": ({}, (None, 8)),
    "olmo3": ({"sliding_window": 8, "layer_types": MIXED_LAYERS}, (None, 8)),
}
WAYS = {"native": {}, "torch": {"native": False}}
LOADED = [(name, "native") for name in MODELS] + [(name, "torch") for name in ("mistral", "gemma3_text", "gpt_oss")]


def load(folder: Path, *, num_blocks: int = 900, kv_dtype: str = "auto", **fields: Any) -> ModelRunner:
    model = ModelConfig(alias="tiny", path=str(folder), **{**TINY, **fields})
    return load_runner(model, EngineConfig(block_size=BLOCK, num_blocks=num_blocks, kv_dtype=kv_dtype))


@pytest.fixture(scope="module", params=LOADED, ids=" ".join)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The name of a model, and its runner."""
    name, way = request.param
    runner = load(save_model(tmp_path_factory.mktemp(name), name, **MODELS[name][0]), **WAYS[way])
    runner.can_overlap = True  # where a test asks for it
    yield name, runner
    runner.close()


@cache
def references(name: str) -> list[list[int]]:
    """The answers of transformers, one prompt after the other, by a forward pass over everything for each token."""
    model = build_model(name, **MODELS[name][0])
    model.set_attn_implementation("eager")
    found = []
    for prompt in prompts(VOCAB_SIZE):
        tokens = list(prompt)
        with torch.inference_mode():
            for _ in range(NUM_NEW):
                tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
        found.append(tokens[len(prompt) :])
    return found


def make_drive(runner: ModelRunner, **config: Any) -> Drive:
    """A core whose lost blocks, and the null block, hold no numbers."""
    drive = Drive(runner=runner, **{"overlap": False, "max_num_batched_tokens": STEP, "prefill_chunk": STEP, **config})
    drive.core.pool._on_evict = partial(poison, runner)
    poison(runner, 0)
    return drive


def poison(runner: ModelRunner, block_id: int) -> None:
    runner.kv.fill_block(block_id, float("nan"))


def requests(first_id: int = 0) -> list[Any]:
    return [request(first_id + index, prompt, sampling=LONG) for index, prompt in enumerate(prompts(VOCAB_SIZE))]


def answers(drive: Drive, first_id: int = 0) -> list[list[int]]:
    found = drive.tokens(*requests(first_id))
    drive.assert_empty()
    return [found[first_id + index] for index in range(len(prompts(VOCAB_SIZE)))]


def test_groups(loaded: Any) -> None:
    """Each family's layers have the tables that its windows ask for, and groups share one memory."""
    name, runner = loaded
    assert runner.windows == MODELS[name][1]
    assert len({pool.data_ptr() for pool in runner.kv.keys.values()}) == len(runner.layers) // len(runner.windows)


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("step", [8, 16, 200])
def test_long_answers(loaded: Any, step: int, overlap: bool) -> None:
    """Answers far beyond the window, cold and from cached prefixes, beside each other: transformers' tokens."""
    name, runner = loaded
    drive = make_drive(runner, overlap=overlap, max_num_batched_tokens=step, prefill_chunk=step)
    assert answers(drive) == references(name)
    assert answers(drive, 100) == references(name)
    assert drive.answers[100].num_cached_tokens >= 36


def test_continued_prompt(loaded: Any) -> None:
    """A prompt that is another's prompt and answer is found up to its last block, and continues as that would."""
    name, runner = loaded
    drive = make_drive(runner)
    [prompt, *_] = prompts(VOCAB_SIZE)
    wanted = references(name)[0]
    half = sampling(max_tokens=NUM_NEW // 2, temperature=0.0)
    first = drive.tokens(request(1, prompt, sampling=half))[1]
    second = drive.tokens(request(2, [*prompt, *first], sampling=half))[2]
    assert [*first, *second] == wanted
    assert drive.answers[2].num_cached_tokens == (len(prompt) + NUM_NEW // 2 - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_preempted(loaded: Any, overlap: bool) -> None:
    """Sequences that lose their blocks every few steps have transformers' tokens."""
    name, runner = loaded
    drive = make_drive(runner, overlap=overlap)

    def preempt(running: tuple[Sequence, ...]) -> tuple[Sequence, ...]:
        return running if len(drive.plans) % 7 == 0 else ()

    drive.core.scheduler.forced_preempt = preempt
    assert answers(drive) == references(name)
    assert drive.core.stats.preemptions > 0


def test_short_memory(tmp_path: Path) -> None:
    """In a memory for one answer that keeps its windows, all are served one beside the other, and none is refused."""
    name = "gemma3_text"
    folder = save_model(tmp_path, name, **MODELS[name][0])
    windows = MODELS[name][1]
    least = -(-(41 + NUM_NEW) // BLOCK) + (len(windows) - 1) * most_in_window(8, BLOCK, STEP) + 1
    runner = load(folder, num_blocks=-(-(least - 1) // len(windows)) + 1)
    drive = make_drive(runner)
    assert answers(drive) == references(name)
    assert least <= runner.num_blocks < least + len(windows)
    runner.close()


@pytest.mark.parametrize("name", ["mistral", "phi3"])
def test_memory_of_a_long_answer(name: str, tmp_path: Path) -> None:
    """4,000 tokens of a model whose layers all have windows hold the blocks of one window."""
    window = MODELS[name][1][0]
    assert window is not None
    folder = save_model(tmp_path, name, max_position_embeddings=8_192)
    runner = load(folder, num_blocks=40)
    drive = make_drive(runner)
    drive.add(request(1, prompts(VOCAB_SIZE)[0], sampling=sampling(max_tokens=4_000, ignore_eos=True)))
    held = []
    while drive.core.has_work:
        drive.step()
        held.append(drive.core.stats.blocks_used)
    assert len(drive.answers[1].token_ids) == 4_000
    assert max(held[100:]) <= -(-window // BLOCK) + 2
    runner.close()


@pytest.mark.parametrize("name", ["mistral", "gemma3_text"])
def test_int8_keys(name: str, tmp_path: Path) -> None:
    """Keys in eight bits change tokens, and freeing does not: the same with and without a neighbour, cold and warm."""
    runner = load(save_model(tmp_path, name, **MODELS[name][0]), kv_dtype="int8")
    drive = make_drive(runner)
    alone = [drive.tokens(one)[one.seq_id] for one in requests()]
    assert answers(make_drive(runner), 100) == alone
    runner.close()


def test_proposals(loaded: Any) -> None:
    """Proposed tokens, right and wrong, leave no trace in a window."""
    name, runner = loaded
    wanted = references(name)
    known = [(*prompt, *answer) for prompt, answer in zip(prompts(VOCAB_SIZE), wanted, strict=True)]
    proposing = ProposingRunner(runner, known)
    proposing.can_overlap = False
    drive = Drive(runner=proposing, prefill_chunk=64, prefix_caching=False)
    drive.core.pool._on_evict = partial(poison, runner)
    assert answers(drive) == wanted
    assert proposing.num_wrong > 0


@pytest.mark.parametrize("name", ["mistral", "gemma3_text", "gpt_oss"])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_what_is_computed_before_loading(name: str, kv_dtype: str, tmp_path: Path) -> None:
    """Blocks, bytes, windows and the longest sequence are those of the pool that a load then has."""
    folder = save_model(tmp_path, name, max_position_embeddings=4_096, **MODELS[name][0])
    config = json.loads((folder / "config.json").read_text())
    engine = EngineConfig(block_size=BLOCK, kv_cache_bytes=900_000, max_num_batched_tokens=STEP, kv_dtype=kv_dtype)
    for one in (engine, replace(engine, num_blocks=77), replace(engine, kv_cache_bytes=1 << 30, max_num_seqs=2)):
        said = capacity(config, one, dtype="float32", memory_bytes=1 << 30, on_gpu=False, parameters=None)
        runner = load_runner(ModelConfig(alias="tiny", path=str(folder), **TINY), one)
        pools = {pool.data_ptr(): pool.nbytes for pool in (*runner.kv.keys.values(), *runner.kv.values.values())}
        held = max_servable_tokens(runner.max_model_len, runner.num_blocks, BLOCK, runner.windows, STEP)
        assert said.windows == runner.windows == MODELS[name][1]
        assert (said.num_blocks, said.max_tokens, said.pool_bytes) == (runner.num_blocks, held, sum(pools.values()))
        runner.close()


@pytest.mark.parametrize("name", ["mistral", "gemma3_text"])
def test_as_many_streams_as_computed(name: str, tmp_path: Path) -> None:
    """So many of 1,024 tokens are in memory at once, each to its last token, and one more is not."""
    folder = save_model(tmp_path, name, max_position_embeddings=2_048, **MODELS[name][0])
    windows, step = MODELS[name][1], 256
    first, others = (most_blocks(1_024, windows, BLOCK, tokens) for tokens in (step, 0))
    runner = load(folder, num_blocks=-(-(first + others) // len(windows)) + 1)
    config = json.loads((folder / "config.json").read_text())
    sizes = {"max_num_batched_tokens": step, "prefill_chunk": step}
    engine = EngineConfig(block_size=BLOCK, num_blocks=(runner.num_blocks - 1) // len(windows) + 1, **sizes)
    said = capacity(config, engine, dtype="float32", memory_bytes=1 << 30, on_gpu=False, parameters=None)
    assert said.streams[1024] == 2
    assert said.kept is not None
    assert said.kept.streams[1024] == 0
    drive = Drive(runner=runner, prefix_caching=False, speculation="off", **sizes)
    drive.add(
        *(
            request(index, [index + 2, *range(2, 102)] * 10, sampling=sampling(max_tokens=14, ignore_eos=True))
            for index in range(4)
        )
    )
    running = []
    while drive.core.has_work:
        drive.step()
        running.append(drive.core.stats.running)
    assert max(running) == 2
    assert drive.core.stats.preemptions == 0
    runner.close()


def shapes(*windows: int | None) -> dict[int, LayerShape]:
    return {
        index: LayerShape(num_kv_heads=1, key_dim=8, value_dim=8, sliding_window=window)
        for index, window in enumerate(windows)
    }


def test_bytes_of_a_block() -> None:
    """A block takes the bytes of the layers of one group."""
    layers = shapes(*[8, 8, 8, 8, 8, None] * 2)
    groups = groups_for(layers, 100)
    assert groups[0] == (5, 11)
    assert windows_of(groups, layers, 100) == (None, 8, 8, 8, 8, 8)
    whole = bytes_per_block(layers, BLOCK, torch.float32)
    assert 6 * bytes_per_block(layers, BLOCK, torch.float32, groups=groups) == whole


def test_layers_unlike() -> None:
    """Layers of other shapes, and windows that no sequence is longer than, have one table, and keep everything."""
    unlike = {**shapes(8, 8, None), 3: LayerShape(num_kv_heads=2, key_dim=8, value_dim=8, sliding_window=8)}
    assert windows_of(groups_for(unlike, 100), unlike, 100) == (None,)
    assert windows_of(groups_for(shapes(8, None, 8, None), 8), shapes(8, None, 8, None), 8) == (None,)


@pytest.mark.parametrize("fields", [{"draft": True}, {"type": "cohere2"}], ids=["a draft model", "transformers' code"])
def test_where_everything_is_kept(fields: dict[str, Any], tmp_path: Path, tiny_folder: Callable[[str], Path]) -> None:
    """With a draft model, and on transformers' own code, all layers have one table."""
    folder = tiny_folder(fields.get("type", "gemma3_text"))
    runner = load(folder, draft=str(folder) if "draft" in fields else "")
    assert runner.windows == (None,)
    assert runner.draft is None or runner.draft.runner.windows == (None,)
    runner.close()
