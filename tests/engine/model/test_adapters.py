"""Sequences with adapters give the tokens of the model that has the adapter merged in, whatever is beside them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install streamserve[engine]")

from safetensors.torch import load_file, save_file  # noqa: E402  (after the skips)

from streamserve.engine.model.batch import build_batch  # noqa: E402
from streamserve.engine.model.decoder.families import FAMILIES  # noqa: E402
from streamserve.engine.model.load.source import ModelLoadError  # noqa: E402
from streamserve.engine.model.runner import ModelRunner  # noqa: E402
from streamserve.engine.plan import Chunk, StepPlan  # noqa: E402
from tests.engine.model.decoder.test_families import EXPERTS as MOE  # noqa: E402
from tests.engine.model.decoder.test_families import SHAPES  # noqa: E402
from tests.support.engines.cores import Drive, request, sampling  # noqa: E402
from tests.support.models.adapters import LLAMA, PHI3, add_experts, save_adapter, save_merged  # noqa: E402
from tests.support.models.model_driver import load_tiny, prompts  # noqa: E402
from tests.support.models.tiny_models import VOCAB_SIZE, save_model  # noqa: E402

NUM_NEW = 24
# What an adapter may change in a model of each type: fused layers, norms of heads, windows, layers without rotation.
TARGETS = {"llama": LLAMA, "qwen3": LLAMA, "gemma3_text": LLAMA, "phi3": PHI3, "smollm3": LLAMA, "olmo2": LLAMA}
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}  # that one native call computes

Made = dict[str, Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """Return a function to a model's folder, its adapters' and those of the merged models."""
    kept: dict[str, Made] = {}

    def make(model_type: str) -> Made:
        if model_type not in kept:
            folder = tmp_path_factory.mktemp(model_type)
            model = save_model(folder / "model", model_type, **SHAPE)
            targets = TARGETS[model_type]
            first = save_adapter(folder / "first", model, targets, seed=1)
            second = save_adapter(folder / "second", model, (targets[0], targets[-1]), rank=3, seed=2, use_rslora=True)
            kept[model_type] = {"": model, "first": first, "second": second}
            for name, adapter in (("first", first), ("second", second)):
                kept[model_type][f"{name} merged"] = save_merged(folder / f"{name}-merged", model, adapter)
        return kept[model_type]

    return make


def loaded(made: Made, **config: Any) -> ModelRunner:
    adapters = {name: str(made[name]) for name in ("first", "second")}
    return load_tiny(made[""], adapters=adapters, **config)


def tokens(
    runner: ModelRunner, adapters: Iterable[str], *, num_at_once: int = 4, prefix_caching: bool = True, **fields: Any
) -> list[list[int]]:
    """Return the answers to one prompt after the other, each by the next adapter."""
    drive = Drive(runner=runner, max_model_len=None, prefix_caching=prefix_caching)
    how = sampling(**{"max_tokens": NUM_NEW, "temperature": 0.0, **fields})
    wanted = [
        request(number, prompt, sampling=how, adapter=adapter)
        for number, (prompt, adapter) in enumerate(zip(prompts(VOCAB_SIZE) * 3, adapters, strict=False), 1)
    ]
    for first in range(0, len(wanted), num_at_once):
        drive.run(*wanted[first : first + num_at_once])
    drive.assert_empty()
    return [list(drive.answers[one.seq_id].token_ids) for one in wanted]


@pytest.mark.parametrize("is_native", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize("model_type", TARGETS)
def test_an_adapter_gives_what_the_merged_model_gives(
    made: Callable[[str], Made], model_type: str, is_native: bool
) -> None:
    """Two adapters and none in turns, in one batch: each answer is that of a model of its own."""
    folders = made(model_type)
    in_turns = ["first", "", "second", "first", "second", ""]
    with_adapters = loaded(folders, native=is_native)
    found = tokens(with_adapters, in_turns)
    assert found == tokens(with_adapters, in_turns, num_at_once=1), "whatever is beside it"
    with_adapters.close()
    firsts = []
    for name in ("", "first", "second"):
        alone = load_tiny(folders[f"{name} merged" if name else ""], native=is_native)
        wanted = tokens(alone, [""] * len(in_turns))
        alone.close()
        firsts.append(wanted[0])
        for index, own in enumerate(in_turns):
            if own == name:
                assert found[index] == wanted[index], (name, index)
    assert firsts[0] != firsts[1] != firsts[2] != firsts[0], "each adapter changes the answer"


@pytest.mark.parametrize("way", [{"temperature": 1.0, "seed": 5}, {"temperature": 0.8, "seed": 6, "top_k": 20}])
def test_draws_are_those_of_the_merged_model(made: Callable[[str], Made], way: dict[str, Any]) -> None:
    folders = made("llama")
    with_adapters, merged = loaded(folders), load_tiny(folders["first merged"])
    assert tokens(with_adapters, ["first"] * 4, **way) == tokens(merged, [""] * 4, **way)
    merged.close()
    with_adapters.close()


@pytest.mark.parametrize("with_", ["proposals", "little memory", "overlap", "penalties", "a draft model"])
def test_beside_what_else_steps_have(made: Callable[[str], Made], with_: str) -> None:
    """Proposed tokens, preemption, steps that overlap, penalties, a draft model: the same tokens as alone."""
    folders, in_turns = made("llama"), ["first", "", "second", "first"]
    sampled = {"repetition_penalty": 1.3, "presence_penalty": 0.5} if with_ == "penalties" else {}
    how = sampling(max_tokens=NUM_NEW, temperature=0.0, **sampled)
    asked = [
        request(number, prompt, sampling=how, adapter=adapter)
        for number, (prompt, adapter) in enumerate(zip(prompts(VOCAB_SIZE), in_turns, strict=True), 1)
    ]
    plain = loaded(folders)
    wanted = [Drive(runner=plain, max_model_len=None).tokens(one)[one.seq_id] for one in asked]
    plain.close()
    draft = {"draft": str(folders[""])} if with_ == "a draft model" else {}
    num_blocks = {"num_blocks": 24} if with_ == "little memory" else {}
    runner = loaded(folders, **draft, **num_blocks)
    if with_ == "proposals":
        asked = [replace(one, prediction_token_ids=tuple(own)) for one, own in zip(asked, wanted, strict=True)]
    drive = Drive(
        runner=runner,
        max_model_len=None,
        overlap=with_ == "overlap",
        draft=replace(runner.draft, weight=0.05) if runner.draft is not None else None,
        speculation="lookup" if with_ in ("proposals", "a draft model") else "off",
    )
    found = drive.tokens(*asked)
    assert [found[one.seq_id] for one in asked] == wanted
    most = max(len(chunk.samples) for plan in drive.plans for chunk in plan.chunks if chunk.adapter)
    assert (most > 1) == (with_ in ("proposals", "a draft model"))
    assert (drive.core.scheduler.num_preemptions > 0) == (with_ == "little memory")
    runner.close()


def test_the_same_prompt_of_another_adapter_is_computed_anew(made: Callable[[str], Made]) -> None:
    """Nothing of the prefix cache is shared between adapters, also of what is public to all tenants."""
    runner = loaded(made("llama"), block_size=16)
    [prompt] = prompts(VOCAB_SIZE)[:1]
    prompt = [*prompt, *prompt, *prompt]
    cached = {}
    for num_public in (0, 32):
        drive = Drive(runner=runner, max_model_len=None)
        for number, name in enumerate(("", "first", "second", "first", ""), 1):
            how = sampling(max_tokens=4, temperature=0.0)
            drive.run(request(number, prompt, sampling=how, adapter=name, num_public_tokens=num_public))
            cached[num_public, number] = drive.answers[number].num_cached_tokens
        first, second = drive.answers[1].token_ids, drive.answers[2].token_ids
        assert first != second
        assert (drive.answers[5].token_ids, drive.answers[4].token_ids) == (first, second)
    assert [bool(cached[0, number]) for number in range(1, 6)] == [False, False, False, True, True]
    assert [bool(cached[32, number]) for number in range(1, 6)] == [False, False, False, True, True]
    runner.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_neighbour_with_an_adapter_changes_no_bit(made: Callable[[str], Made], dtype: str) -> None:
    """Of a sequence without, in the native kernels; and its own numbers do not depend on who is beside it."""
    runner = loaded(made("llama"), dtype=dtype)
    assert runner.loaded.model.native_step is not None
    first, second = (prompt[:18] for prompt in prompts(VOCAB_SIZE)[:2])
    alone = logits(runner, (first, ""))
    own = logits(runner, (second, "first"))
    beside = logits(runner, (first, ""), (second, "first"), (second, "second"), (first, "first"))
    assert torch.equal(beside[0], alone[0])
    assert torch.equal(beside[1], own[0])
    assert not torch.equal(beside[1], beside[2])
    assert not torch.equal(beside[0], beside[3])
    many = logits(runner, (second, "first"), (first, "second"), cuts=range(1, 18))
    assert torch.equal(many[0], own[0]), "a prompt computed token by token has other bits"
    runner.close()


def logits(runner: ModelRunner, *asked: tuple[list[int], str], cuts: Iterable[int] = (5, 17)) -> list[Any]:
    """Return the logits after a prompt, cut into chunks at these positions, each step with all of them."""
    length = min(len(prompt) for prompt, _ in asked)
    num_blocks = -(-length // runner.block_size)
    found: list[Any] = []
    for start, end in pairwise((0, *cuts, length)):
        chunks = tuple(
            Chunk(
                seq_id=number,
                start=start,
                token_ids=tuple(prompt[start:end]),
                block_table=tuple(range(1 + num_blocks * number, 1 + num_blocks * (number + 1))),
                adapter=name,
            )
            for number, (prompt, name) in enumerate(asked)
        )
        batch = build_batch(StepPlan(step_id=0, chunks=chunks), runner.block_size, runner.loaded.device)
        with torch.inference_mode():
            _, out = runner.forward(batch, list(batch.last_rows))
        assert out is not None
        found = [out[[one.seq_id for one in batch.chunks].index(number)] for number in range(len(asked))]
    return found


def test_adapters_stay_whole_where_the_model_is_rounded(made: Callable[[str], Made]) -> None:
    """Their weights keep the model's dtype; its own are in four bits. What they take is counted."""
    folders = made("llama")
    plain, rounded = load_tiny(folders[""], quantize="int4"), loaded(folders, quantize="int4")
    change = rounded.loaded.model.adapters["first"].layers[0]["qkv"][0]
    assert change.down.name == "native"
    assert rounded.loaded.weight_bytes == plain.loaded.weight_bytes + sum(
        one.num_bytes for one in rounded.loaded.model.adapters.values()
    )
    found = tokens(rounded, ["first", "", "second"])
    assert found[1] == tokens(plain, ["", ""])[1]
    assert len({tuple(answer) for answer in found}) == 3
    rounded.close()
    plain.close()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another kind": ({"peft_type": "IA3"}, "is not of a LoRA adapter"),
    "DoRA": ({"use_dora": True}, "use_dora True"),
    "biases": ({"bias": "all"}, "bias 'all'"),
    "whole layers": ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "an alpha for some": ({"alpha_pattern": {"q_proj": 3}}, "alpha_pattern"),
    "no alpha": ({"lora_alpha": "much"}, "lora_alpha"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_be_computed_is_refused_by_name(made: Callable[[str], Made], tmp_path: Path, why: str) -> None:
    fields, words = REFUSED[why]
    model = made("llama")[""]
    adapter = save_adapter(tmp_path / "adapter", model, ("q_proj",), **fields)
    with pytest.raises(ModelLoadError, match=words):
        load_tiny(model, adapters={"a": str(adapter)})


def test_files_that_are_no_adapter_of_this_model_are_refused(made: Callable[[str], Made], tmp_path: Path) -> None:
    """A missing folder or file, one that is cut short, another model's, one with a layer that there is not."""
    model = made("llama")[""]

    def refused(words: str, folder: Path) -> None:
        with pytest.raises(ModelLoadError, match=words) as error:
            load_tiny(model, adapters={"a": str(folder)})
        assert str(folder) in str(error.value)

    refused("has no adapter_model.safetensors", tmp_path / "absent")
    whole = save_adapter(tmp_path / "whole", model, ("q_proj", "down_proj"))
    weights = load_file(whole / "adapter_model.safetensors")
    for name, words, kept in (
        ("half", "lacks weights of layers.0", {name: one for name, one in weights.items() if "lora_A" in name}),
        (
            "embedding",
            "no LoRA weight of a layer",
            {**weights, "base_model.model.model.embed_tokens.lora_A.weight": torch.ones(2, 2)},
        ),
        ("deeper", "changes layers.9", {name.replace("layers.0", "layers.9"): one for name, one in weights.items()}),
        ("gate", "no such linear layer", {name.replace("q_proj", "router"): one for name, one in weights.items()}),
    ):
        folder = tmp_path / name
        folder.mkdir()
        save_file(kept, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text((whole / "adapter_config.json").read_text())
        refused(words, folder)
    larger = save_model(tmp_path / "larger", "llama", hidden_size=96)
    refused("trained on another model", save_adapter(tmp_path / "other", larger, ("q_proj",)))
    (whole / "adapter_config.json").write_text("{")
    refused("cannot be read", whole)
    (whole / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "lora_alpha": 8}))
    with (whole / "adapter_model.safetensors").open("r+b") as file:
        file.truncate(100)
    refused("cannot be read", whole)


def test_a_model_on_transformers_own_code_takes_none(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "cohere2")
    adapter = save_adapter(tmp_path / "adapter", model, ("q_proj",))
    with pytest.raises(ModelLoadError, match="takes no adapters"):
        load_tiny(model, adapters={"a": str(adapter)})


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EXPERTS = ("gpt_oss", "mixtral", "qwen3_moe")  # without a dense feed-forward part beside them
OTHERS = {name: (name, MOE if name == "qwen3_moe" else {}) for name in FAMILIES if name not in TARGETS}
OTHERS |= {name: given for name, given in SHAPES.items() if name.startswith("gemma4_text")}


@pytest.mark.parametrize("name", OTHERS)
def test_every_other_family(name: str, tmp_path: Path) -> None:
    """As the merged model, beside a sequence without; of experts attention alone."""
    model_type, fields = OTHERS[name]
    model = save_model(tmp_path / "model", model_type, **fields)
    adapter = save_adapter(tmp_path / "adapter", model, ATTENTION if model_type in EXPERTS else LLAMA)
    with_adapter = load_tiny(model, adapters={"a": str(adapter)})
    merged, plain = load_tiny(save_merged(tmp_path / "merged", model, adapter)), load_tiny(model)
    found, changed, own = tokens(with_adapter, ["a", "", "a"]), tokens(merged, [""] * 3), tokens(plain, [""] * 3)
    assert found == [changed[0], own[1], changed[2]]
    assert changed[0] != own[0]
    for runner in (with_adapter, merged, plain):
        runner.close()


@pytest.mark.parametrize("packed", [None, False], ids=["packed", "plain"])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts(name: str, packed: bool | None, tmp_path: Path) -> None:
    """As the merged model, each expert with changes of its own, beside a sequence without."""
    model_type, fields = OTHERS[name]
    model = save_model(tmp_path / "model", model_type, **fields)
    adapter = save_adapter(tmp_path / "adapter", model, ATTENTION)
    add_experts(adapter, model)
    with_adapter = load_tiny(model, adapters={"a": str(adapter)}, packed=packed)
    merged, plain = load_tiny(save_merged(tmp_path / "merged", model, adapter)), load_tiny(model)
    attention = load_tiny(save_merged(tmp_path / "attention", model, save_adapter(tmp_path / "of", model, ATTENTION)))
    assert all(layer["gate_up.3"] and layer["down.0"] for layer in with_adapter.loaded.model.adapters["a"].layers)
    found, changed, own = tokens(with_adapter, ["a", "", "a"]), tokens(merged, [""] * 3), tokens(plain, [""] * 3)
    assert found == [changed[0], own[1], changed[2]]
    assert changed[0] not in (own[0], tokens(attention, [""] * 3)[0])
    for runner in (with_adapter, merged, plain, attention):
        runner.close()


def test_layers_beside_attention_and_the_dense_part_are_refused(tmp_path: Path) -> None:
    """Gemma 4's inputs of layers, which PEFT's "all-linear" includes: by name, with the way out."""
    model = save_model(tmp_path / "model", "gemma4_text")
    adapter = save_adapter(tmp_path / "adapter", model, (*ATTENTION, "per_layer_input_gate"))
    with pytest.raises(ModelLoadError, match=r"layers.0.per_layer_input_gate.*Train it on layers of attention"):
        load_tiny(model, adapters={"a": str(adapter)})
