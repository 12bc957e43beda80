"""A real model from its GGUF file, end to end: tokenizer, template, dequantised weights, and the engine's answers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from streamserve.clients.factory import hf_client
from streamserve.engine.config import EngineConfig, ModelConfig
from streamserve.engine.model.load.gguf.config import config_of
from streamserve.engine.model.load.gguf.file import GGUFFile
from streamserve.engine.model.load.gguf.weights import GGUFWeights
from streamserve.engine.model.load.loader import support_of
from streamserve.engine.text.hf_tokenizer import HFTokenizer
from streamserve.protocol.events import Done, Token
from streamserve.protocol.requests import GenerateRequest, Message, SamplingParams
from tests.support.models.smollm2 import smollm2

pytestmark = pytest.mark.proof

pytest.importorskip("gguf", reason="needs gguf: pip install gguf")

QUESTION = "What is the capital of France?"
NUM_TOKENS = 8


@pytest.fixture(scope="module")
def path() -> Path:
    return smollm2()


def test_weights_are_those_of_the_reference(path: Path) -> None:
    """Tensors of each type in the file are dequantised to the bits of the `gguf` package's reader."""
    import gguf

    file = GGUFFile(path)
    weights = GGUFWeights(file, torch.float32)
    wanted = {tensor.name: tensor for tensor in gguf.GGUFReader(str(path)).tensors}
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "model.layers.7.mlp.down_proj.weight": "blk.7.ffn_down.weight",
        "model.layers.29.self_attn.v_proj.weight": "blk.29.attn_v.weight",
    }
    for name, tensor in names.items():
        plain = gguf.dequantize(wanted[tensor].data, wanted[tensor].tensor_type)
        assert torch.equal(weights.tensor(name), torch.from_numpy(plain.copy()).view(weights.tensor(name).shape)), name
    assert len(list(weights.names())) == len(file.tensors)


def test_the_tokenizer_is_the_models(path: Path) -> None:
    """Ids of a chat are those of the model's own tokenizer.json; text comes back; digits stand alone; no bos."""
    tokenizer = HFTokenizer(str(path))
    request = GenerateRequest(model="m", messages=(Message(role="user", content=QUESTION),))
    ids = list(tokenizer.encode(request).token_ids)
    # <|im_start|> is 1, <|im_end|> 2; the template brings the system prompt.
    assert ids[:3] == [1, 9690, 198]
    assert ids[-3:] == [1, 520, 9531] or ids[-4:] == [1, 520, 9531, 198]
    assert ids.count(1) == 3
    assert tokenizer.decode(ids).endswith(f"user\n{QUESTION}\nassistant\n")
    assert tokenizer.vocab_size == 49_152
    assert tokenizer.is_byte_exact
    assert len(tokenizer.text_ids("2026")) == 4
    assert tokenizer.text_ids("hello")[:1] != (1,)
    assert tokenizer.eos_token_ids == {2}


def test_a_chat_has_the_ids_of_transformers_own_tokenizer(path: Path) -> None:
    """transformers reads tokenizer and template from the same file: the prompt is the same, token by token."""
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    turns = [
        {"role": "system", "content": "You are terse."},
        {"role": "user", "content": "Wie geht's, 日本? 1,234 "},
        {"role": "assistant", "content": "Fine.\n"},
        {"role": "user", "content": QUESTION},
    ]
    plain = reference.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    messages = tuple(Message(role=turn["role"], content=turn["content"]) for turn in turns)  # type: ignore[arg-type]
    ours = HFTokenizer(str(path)).encode(GenerateRequest(model="m", messages=messages)).token_ids
    assert list(ours) == list(plain)


def test_what_is_known_of_it_before_a_load(path: Path) -> None:
    """`streamserve_models` names the file's type and what its weights take in memory."""
    found = support_of(str(path))
    assert (found.verdict, found.model_type) == ("supported", "llama")
    assert "GGUF Q4_1" in found.traits
    assert "tied head" in found.traits
    assert config_of(GGUFFile(path))["eos_token_id"] == [0, 2]


async def test_the_engine_answers_a_question(path: Path) -> None:
    """Greedy, in float32: the right city, by the tokens that transformers computes of the dequantised weights."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    model = ModelConfig(alias="m", path=str(path), dtype="float32", device="cpu", parity_probe=False, native=False)
    client = hf_client(model, EngineConfig(num_blocks=16))
    client.start()
    request = GenerateRequest(
        model="m",
        messages=(Message(role="user", content=QUESTION),),
        sampling=SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS),
    )
    try:
        async with asyncio.timeout(300):
            while client.describe().state == "loading":  # noqa: ASYNC110  # loading happens on another thread
                await asyncio.sleep(0.05)
            assert client.describe().state == "ready", client.describe()
            events = [event async for event in await client.generate(request)]
    finally:
        await client.aclose()
    assert isinstance(events[-1], Done)
    assert events[-1].finish_reason == "stop"  # by <|im_end|>, not by the limit
    tokens = [token_id for event in events if isinstance(event, Token) for token_id in event.token_ids]
    assert "Paris" in "".join(event.text for event in events if isinstance(event, Token))

    config = AutoConfig.for_model(**config_of(GGUFFile(path)))
    weights = GGUFWeights(GGUFFile(path), torch.float32).lazily()
    plain = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
        None, config=config, state_dict=weights, dtype=torch.float32, attn_implementation="eager"
    )
    prompt = list(HFTokenizer(str(path)).encode(request).token_ids)
    found = plain.generate(torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, do_sample=False)[0, len(prompt) :]
    assert tokens == found.tolist()[: len(tokens)]
    assert len(tokens) >= NUM_TOKENS - 1
