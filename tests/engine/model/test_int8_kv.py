"""Keys and values in eight bits: torch and kernels store the same bits, and chunks of any size give the same tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install streamserve[engine]")

from streamserve.engine.capacity import capacity, kv_bytes_per_token  # noqa: E402  (after the skip)
from streamserve.engine.config import EngineConfig, ModelConfig  # noqa: E402
from streamserve.engine.model.kv_cache import SCALE_BYTES, dequantize, quantize  # noqa: E402
from streamserve.engine.model.load.source import ModelLoadError  # noqa: E402
from streamserve.engine.model.load.start import load_runner  # noqa: E402
from streamserve.engine.model.runner import ModelRunner  # noqa: E402
from tests.support.engines.cores import Drive, request, sampling  # noqa: E402
from tests.support.models.model_driver import BLOCK_SIZE, NUM_BLOCKS, TINY, Driver, prompts  # noqa: E402
from tests.support.models.tiny_models import VOCAB_SIZE, config_of  # noqa: E402

MODELS = ("llama", "qwen3", "gemma2", "gpt_oss", "gpt2")  # whole native steps, layers, experts, transformers' own code


def load(folder: Path, **fields: Any) -> ModelRunner:
    engine = EngineConfig(
        block_size=fields.pop("block_size", BLOCK_SIZE),
        num_blocks=fields.pop("num_blocks", NUM_BLOCKS),
        kv_dtype=fields.pop("kv_dtype", "int8"),
    )
    return load_runner(ModelConfig(alias="tiny", path=str(folder), **{**TINY, **fields}), engine)


def test_a_vector_comes_back_within_half_a_step() -> None:
    """Of its own scale: a large neighbour takes nothing from a small vector. Zeros stay zeros."""
    vectors = torch.randn(3, 50, 33) * torch.logspace(-20, 20, 50)[None, :, None]
    rows = quantize(vectors)
    assert (rows.dtype, rows.shape) == (torch.int8, (3, 50, 33 + SCALE_BYTES))
    error = (dequantize(rows, torch.float32) - vectors).abs().amax(-1)
    assert bool((error <= vectors.abs().amax(-1) / 127 * 0.5001).all())
    assert torch.equal(dequantize(quantize(torch.zeros(1, 2, 5)), torch.float32), torch.zeros(1, 2, 5))


@pytest.mark.parametrize("lost", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_not_hidden(lost: float) -> None:
    vectors = torch.randn(2, 4, 16)
    vectors[1, 2, 5] = lost
    found = dequantize(quantize(vectors), torch.float32)
    assert bool(found[1, 2].isnan().any())
    assert bool(found[0].isfinite().all())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_native_step_stores_what_torch_stores(tiny_folder: Callable[[str], Path], dtype: str) -> None:
    """Bit for bit, from the same numbers: the rows of a step's first layer, whose inputs are alike."""
    runner = load(tiny_folder("llama"), dtype=dtype)
    assert runner.loaded.model.native_step is not None
    driver = Driver(runner)
    [prompt] = prompts(VOCAB_SIZE)[:1]
    one = driver.start(1, prompt, 4)
    driver.step([one], len(prompt))
    native = {index: (runner.kv.keys[index].clone(), runner.kv.values[index].clone()) for index in runner.kv.keys}
    places = (divmod(at, BLOCK_SIZE) for at in range(len(prompt)))
    slots = torch.tensor([one.tables[0][block] * BLOCK_SIZE + offset for block, offset in places])
    for keys, values in native.values():
        for rows in (keys[:, slots], values[:, slots]):
            again = quantize(dequantize(rows, torch.float32))
            scales = [part[..., -SCALE_BYTES:].contiguous().view(torch.float32) for part in (again, rows)]
            assert torch.equal(again[..., :-SCALE_BYTES], rows[..., :-SCALE_BYTES])
            assert torch.allclose(*scales, rtol=1e-6)
            assert bool((rows[..., :-SCALE_BYTES].abs().amax(-1) == 127).all()), "each vector uses its range"
    runner.close()


@pytest.mark.parametrize("is_native", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize("model_type", MODELS)
def test_tokens_do_not_depend_on_how_a_prompt_is_cut(
    tiny_folder: Callable[[str], Path], model_type: str, is_native: bool
) -> None:
    """In chunks of 5 and of 64, alone and side by side."""
    runner = load(tiny_folder(model_type), native=is_native, parity_probe=True)
    found = [Driver(runner).run(prompts(VOCAB_SIZE), max_tokens=16, chunk=chunk) for chunk in (5, 64)]
    assert found[0] == found[1]
    alone = [Driver(runner).run([prompt], max_tokens=16, chunk=64)[0] for prompt in prompts(VOCAB_SIZE)]
    assert alone == found[0]
    runner.close()


@pytest.mark.parametrize("with_", ["little memory", "proposals", "overlap", "a prefix"])
def test_beside_what_else_steps_have(tiny_folder: Callable[[str], Path], with_: str) -> None:
    """Preemption, proposed tokens, overlap, cached prefixes: the same tokens."""
    folder = tiny_folder("llama")
    how = sampling(max_tokens=20, temperature=1.0, seed=4)
    asked = [request(number, prompt, sampling=how) for number, prompt in enumerate(prompts(VOCAB_SIZE), 1)]
    plain = load(folder)
    wanted = [Drive(runner=plain, max_model_len=None).tokens(one)[one.seq_id] for one in asked]
    plain.close()
    runner = load(folder, num_blocks=24 if with_ == "little memory" else NUM_BLOCKS)
    if with_ == "proposals":
        asked = [replace(one, prediction_token_ids=tuple(own)) for one, own in zip(asked, wanted, strict=True)]
    drive = Drive(
        runner=runner,
        max_model_len=None,
        overlap=with_ == "overlap",
        speculation="lookup" if with_ == "proposals" else "off",
    )
    if with_ == "a prefix":
        drive.run(*[replace(one, seq_id=100 + one.seq_id) for one in asked])
    found = drive.tokens(*asked)
    assert [found[one.seq_id] for one in asked] == wanted
    runner.close()


def test_what_a_token_takes_is_known_before_a_load(tiny_folder: Callable[[str], Path]) -> None:
    """A byte a number and four a vector; by the same memory twice the tokens of bfloat16 at usual head sizes."""
    for model_type in ("llama", "gemma2"):
        runner = load(tiny_folder(model_type))
        stored = sum(pool.nbytes for pool in (*runner.kv.keys.values(), *runner.kv.values.values()))
        per_token = kv_bytes_per_token(config_of(model_type).to_dict(), "float32", "int8")
        assert stored == per_token * runner.kv.num_blocks * runner.kv.block_size
        runner.close()
    model = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
    room = {
        kv_dtype: capacity(
            model,
            EngineConfig(kv_dtype=kv_dtype, kv_cache_bytes=4 << 30, max_num_seqs=1024),
            dtype="bfloat16",
            memory_bytes=64 << 30,
            on_gpu=False,
            parameters=None,
        ).num_blocks
        for kv_dtype in ("auto", "int8")
    }
    assert 1.9 < room["int8"] / room["auto"] < 2.0


def test_another_device_is_refused(tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from streamserve.engine.model.load import loader

    monkeypatch.setattr(loader, "choose_device", lambda _name: torch.device("meta"))
    with pytest.raises(ModelLoadError, match="KV_DTYPE"):
        load(tiny_folder("llama"))
