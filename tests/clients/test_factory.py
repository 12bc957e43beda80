"""The ready-made clients: their answers equal those of transformers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from streamserve.clients.factory import echo_client, hf_client, make_client
from streamserve.clients.thread.acceptance import resolve_params
from streamserve.clients.thread.client import ThreadClient
from streamserve.engine.config import EngineConfig, ModelConfig
from streamserve.engine.model.load.source import sampling_defaults, total_memory
from streamserve.protocol.events import Done, Token
from streamserve.protocol.requests import GenerateRequest, Message, SamplingParams
from tests.support.engines.runners import DEADLINE_SECONDS
from tests.support.models.large import large_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


async def ready(client: ThreadClient) -> None:
    client.start()
    async with asyncio.timeout(DEADLINE_SECONDS):
        while client.describe().state == "loading":  # noqa: ASYNC110  # loading happens on another thread
            await asyncio.sleep(0.01)
    assert client.describe().state == "ready", client.describe()


async def answer(client: ThreadClient, **fields: Any) -> tuple[str, list[int]]:
    request = GenerateRequest(**{"model": "m", "sampling": GREEDY, **fields})
    events = [event async for event in await client.generate(request)]
    assert isinstance(events[-1], Done), events[-1]
    tokens = [event for event in events if isinstance(event, Token)]
    return "".join(token.text for token in tokens), [token_id for token in tokens for token_id in token.token_ids]


async def test_echo_by_path() -> None:
    """`path="echo"` needs no weights; the answer to a chat begins without a space."""
    client = make_client(ModelConfig(alias="e", path="echo"))
    await ready(client)
    text, ids = await answer(client, messages=(Message(role="user", content="hi"),))
    assert len(ids) == 16
    assert text == text.strip()
    assert client.describe().device == "cpu"
    await client.aclose()


async def test_echo_takes_the_config() -> None:
    """Block size, pool size and model length come from the config."""
    client = echo_client(config=EngineConfig(block_size=8, num_blocks=9, max_model_len=50))
    await ready(client)
    assert client.stats().blocks_total == 8
    assert client.describe().max_model_len == 50
    await client.aclose()


async def test_a_model_larger_than_the_machine_is_refused_before_its_load(tmp_path: Path) -> None:
    """By its own code and stage, with the sizes and what helps: its file, which has no data, is not opened for it."""
    folder = large_model(tmp_path / "large", 2 * total_memory())
    client = hf_client(ModelConfig(alias="m", path=str(folder), device="cpu"))
    client.start()
    async with asyncio.timeout(DEADLINE_SECONDS):
        while client.describe().state == "loading":  # noqa: ASYNC110  # loading happens on another thread
            await asyncio.sleep(0.01)
    assert (client.describe().state, client.describe().stage) == ("failed", "model_too_large")
    assert '"QUANTIZE": "int4"' in client.describe().message
    await client.aclose()


async def test_missing_model_is_an_error() -> None:
    """A missing folder fails the load, with a message without internals."""
    client = hf_client(ModelConfig(alias="m", path="/nowhere/at/all"))
    client.start()
    async with asyncio.timeout(DEADLINE_SECONDS):
        while client.describe().state == "loading":  # noqa: ASYNC110  # loading happens on another thread
            await asyncio.sleep(0.01)
    assert client.describe().state == "failed"
    assert "Traceback" not in client.describe().message
    await client.aclose()


async def test_a_folder_that_is_no_model_is_named(tmp_path: Path) -> None:
    """The parent of a model's folder has no config.json, and the message says so."""
    pytest.importorskip("transformers", reason="needs the engine extra: pip install streamserve[engine]")
    (tmp_path / "README.md").write_text("The model is in the folder beside this file.")
    client = hf_client(ModelConfig(alias="m", path=str(tmp_path)))
    client.start()
    async with asyncio.timeout(DEADLINE_SECONDS):
        while client.describe().state == "loading":  # noqa: ASYNC110  # loading happens on another thread
            await asyncio.sleep(0.01)
    assert client.describe().message == (
        f"{tmp_path} has no config.json; so it is no model folder. Name the folder that has it."
    )
    await client.aclose()


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama with a byte-level tokenizer and a chat template."""
    torch = pytest.importorskip("torch", reason="needs the engine extra: pip install streamserve[engine]")
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("tiny")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: index for index, piece in enumerate(["<eos>", "<user>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>", "<user>"])
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<eos>",
        chat_template="{% for m in messages %}<user>{{ m.content }}<eos>{% endfor %}",
    ).save_pretrained(folder)
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=len(vocab),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=0,
        bos_token_id=0,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


async def test_hf_client_and_transformers_give_the_same_text(tiny_folder: Path) -> None:
    """Through thread, scheduler, pages and detokenizer: greedy tokens and text of `transformers.generate`."""
    import torch
    import transformers

    model = ModelConfig(alias="m", path=str(tiny_folder), dtype="float32", device="cpu")
    client = hf_client(model, EngineConfig(num_blocks=64, block_size=8))
    await ready(client)
    messages = (Message(role="user", content="where is my parcel? 🙂"),)
    text, ids = await answer(client, messages=messages)
    prompt = await client.tokenize(GenerateRequest(model="m", messages=messages))
    await client.aclose()
    reference = transformers.AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    whole = reference.generate(torch.tensor([prompt]), max_new_tokens=16, min_new_tokens=16, do_sample=False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_folder)
    raw = whole[0, len(prompt) :].tolist()
    assert ids == raw
    assert text == tokenizer.decode(raw, skip_special_tokens=True)


async def test_the_models_own_defaults_fill_what_the_caller_leaves_open(tmp_path: Path) -> None:
    """generation_config.json fills what the caller leaves open, within range; the caller's values stay."""
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.25, "top_k": 7.0, "top_p": 5, "min_p": "x"}')
    defaults = sampling_defaults(tmp_path)
    assert defaults == {"temperature": 0.25, "top_k": 7}
    open_request = GenerateRequest(model="m", prompt="x", unset=("temperature", "top_p", "min_p"))
    filled = resolve_params(open_request, defaults, 1, 100, None)
    assert (filled.temperature, filled.top_k, filled.top_p) == (0.25, 0, 1.0)
    assert sampling_defaults(tmp_path / "none") == {}
