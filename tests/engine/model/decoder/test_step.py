"""A step in one native call computes what the decoder's layers do, for every dense family: of decodes and prompts."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from streamserve.engine.config import ModelConfig
from streamserve.engine.model.batch import StepBatch, build_batch
from streamserve.engine.model.decoder.build import build
from streamserve.engine.model.decoder.decoder import Decoder
from streamserve.engine.model.decoder.families import FAMILIES
from streamserve.engine.model.kernels import Kernels
from streamserve.engine.model.kv_cache import KVCache
from streamserve.engine.model.linear.choose import LinearMaker
from streamserve.engine.model.linear.native import native_back_end, quantize, quantizing_back_end
from streamserve.engine.model.load import loader
from streamserve.engine.model.load.loader import open_source
from streamserve.engine.model.load.start import own_spec
from streamserve.engine.plan import Chunk, StepPlan
from streamserve.native.build import find_compiler
from streamserve.native.library import Library
from tests.engine.model.decoder.test_families import SHAPES
from tests.native.conftest import library  # noqa: F401  (a fixture)
from tests.support.models.model_driver import load_tiny
from tests.support.models.tiny_models import CONFIGS, VOCAB_SIZE, save_model

BLOCK_SIZE, NUM_BLOCKS = 4, 450
NUM_PROMPT_BLOCKS = 40  # the last, which no decode has
LENGTHS = (1, 30, 5, 700, 12, 70)  # a context of two parts among them
WITH_EXPERTS = ("gpt_oss", "qwen3_moe", "mixtral")
DENSE = {
    name: (model_type, changes)
    for name, (model_type, changes) in {**{name: (name, {}) for name in CONFIGS}, **SHAPES}.items()
    if model_type in FAMILIES and model_type not in WITH_EXPERTS
}
# Of the largest number. In half precision the layers round after each operation, and the step does not.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-1, torch.float16: 1.5e-2}
FEW = ("qwen3", "gemma3_text", "smollm3", "olmo2")


def load(folder: Path, dtype: str, native: Library, kind: str = "") -> Decoder:
    """Return the decoder of a tiny model, its linears native: in its own precision or rounded to `kind`."""
    source = open_source(ModelConfig(alias="tiny", path=str(folder), dtype=dtype, device="cpu"))
    found = own_spec(source)
    assert found is not None
    maker: Any = Quantizer(native, kind) if kind else LinearMaker(back_end=native_back_end(native))
    decoder = build(*found, maker, getattr(torch, dtype), torch.device("cpu"))
    decoder.use(Kernels(native))
    return decoder


class Quantizer:
    """Makes native linears in int8 or int4, however far from the plain ones they are."""

    packer = packs = None

    def __init__(self, native: Library, kind: str) -> None:
        self.native, self.kind = native, kind
        self.back_end = quantizing_back_end(native, kind)

    def make(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, is_kept: bool = False) -> Any:
        """Return a quantised layer."""
        return quantize(self.native, self.kind, weight, bias)


def make_kv(decoder: Decoder) -> KVCache:
    kv = KVCache(
        decoder.layer_shapes,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        dtype=decoder.dtype,
        device=torch.device("cpu"),
    )
    generator = torch.Generator().manual_seed(3)
    for pool in (*kv.keys.values(), *kv.values.values()):
        pool.copy_(torch.randn(pool.shape, generator=generator))
    return kv


def chunks(lengths: tuple[int, ...] = LENGTHS, num_tokens: int = 1) -> list[Chunk]:
    """Return decodes at the ends of contexts of these lengths, in blocks of random order."""
    rng = random.Random(1)
    deck = list(range(1, NUM_BLOCKS - NUM_PROMPT_BLOCKS))
    rng.shuffle(deck)
    made = []
    for seq_id, length in enumerate(lengths):
        size = -(-length // BLOCK_SIZE)
        table, deck = tuple(deck[:size]), deck[size:]
        tokens = tuple(rng.randrange(VOCAB_SIZE) for _ in range(num_tokens))
        made.append(Chunk(seq_id=seq_id, start=length - num_tokens, token_ids=tokens, block_table=table))
    return made


def prompt(start: int, num_tokens: int) -> Chunk:
    """Return a chunk of the same prompt, in blocks that no decode has."""
    rng = random.Random(2)
    blocks = list(range(NUM_BLOCKS - NUM_PROMPT_BLOCKS, NUM_BLOCKS))
    rng.shuffle(blocks)
    tokens = [rng.randrange(VOCAB_SIZE) for _ in range(NUM_PROMPT_BLOCKS * BLOCK_SIZE)]
    return Chunk(seq_id=9, start=start, token_ids=tuple(tokens[start : start + num_tokens]), block_table=tuple(blocks))


def batch_of(*rows: Chunk) -> StepBatch:
    return build_batch(StepPlan(step_id=0, chunks=rows), BLOCK_SIZE, torch.device("cpu"))


def run(decoder: Decoder, kv: KVCache, batch: StepBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return hidden states and logits of all last rows, in float32."""
    with torch.inference_mode():
        hidden = decoder.forward(kv, batch)
        return hidden.float(), decoder.logits(hidden, torch.tensor(batch.last_rows)).float()


def error_of(decoder: Decoder) -> float:
    """Return the largest difference between step and layers, in outputs and pools, as a share of the largest number."""
    step, decoder.native_step = decoder.native_step, None
    assert step is not None
    pools = make_kv(decoder), make_kv(decoder)
    batch = batch_of(*chunks(), prompt(5, 90))
    wanted = run(decoder, pools[0], batch)
    decoder.native_step = step
    found = run(decoder, pools[1], batch)
    before, after = ((*kv.keys.values(), *kv.values.values()) for kv in pools)
    pairs = [*zip(wanted, found, strict=True), *((a.float(), b.float()) for a, b in zip(before, after, strict=True))]
    return max(float((one - other).abs().max() / one.abs().max()) for one, other in pairs)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from the name of a shape to a folder with a tiny model."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            model_type, changes = DENSE[name]
            made[name] = save_model(tmp_path_factory.mktemp("model"), model_type, **changes)
        return made[name]

    return make


@pytest.mark.parametrize("name", DENSE)
def test_equals_the_layers(library: Library, folder: Callable[[str], Path], name: str) -> None:  # noqa: F811
    """In float32 to rounding: outputs, logits, and what is stored. Or it says that it does not compute the decoder."""
    decoder = load(folder(name), "float32", library)
    if name.startswith("gemma4"):
        assert decoder.native_step is None
    else:
        assert error_of(decoder) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", FEW)
def test_half_precision(library: Library, folder: Callable[[str], Path], name: str, dtype: str) -> None:  # noqa: F811
    """Within the rounding of the layers."""
    assert error_of(load(folder(name), dtype, library)) < TOLERANCE[getattr(torch, dtype)]


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("name", FEW)
def test_quantised_weights(library: Library, folder: Callable[[str], Path], name: str, kind: str) -> None:  # noqa: F811
    """To what the layers with the same weights compute: inputs round to int8, and rarely to another number."""
    assert error_of(load(folder(name), "float32", library, kind)) < 3e-2


@pytest.mark.parametrize("name", FEW)
def test_a_row_is_the_same_alone(library: Library, folder: Callable[[str], Path], name: str) -> None:  # noqa: F811
    """Bit for bit: neither other decodes, nor their number, nor a neighbour's prompt change a decode."""
    decoder = load(folder(name), "bfloat16", library)
    decodes = chunks()
    together = run(decoder, make_kv(decoder), batch_of(*decodes))[1]
    beside = run(decoder, make_kv(decoder), batch_of(prompt(0, 7), *decodes))[1]
    order = [chunk.seq_id for chunk in batch_of(*decodes).chunks]
    assert torch.equal(beside[: len(decodes)], together)
    for row, seq_id in enumerate(order):
        alone = run(decoder, make_kv(decoder), batch_of(decodes[seq_id]))[1]
        assert torch.equal(alone[0], together[row])


def test_prompts_beside_decodes(library: Library, folder: Callable[[str], Path]) -> None:  # noqa: F811
    """A prompt's numbers are those that it has alone."""
    decoder = load(folder("qwen3"), "float32", library)
    hidden, logits = run(decoder, make_kv(decoder), batch_of(*chunks(), prompt(0, 7)))
    wanted = run(decoder, make_kv(decoder), batch_of(prompt(0, 7)))
    assert torch.equal(hidden[-7:], wanted[0])
    assert torch.equal(logits[-1], wanted[1][0])


@pytest.mark.parametrize("kind", ["", "int4"])
@pytest.mark.parametrize("name", FEW)
def test_chunks_change_nothing(library: Library, folder: Callable[[str], Path], name: str, kind: str) -> None:  # noqa: F811
    """Bit for bit: a prompt in one chunk, in several and token by token gives the same numbers and leaves the same."""
    decoder = load(folder(name), "bfloat16", library, kind)
    length, found = 150, []
    for size in (length, 64, 33, 1):
        kv = make_kv(decoder)
        parts = [
            run(decoder, kv, batch_of(prompt(start, min(size, length - start)))) for start in range(0, length, size)
        ]
        hidden, logits = torch.cat([part[0] for part in parts]), parts[-1][1]
        found.append([hidden, logits, *kv.keys.values(), *kv.values.values()])
    for others in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], others, strict=True))


@pytest.mark.parametrize("num_threads", [2, 3])
def test_threads_change_nothing(library: Library, folder: Callable[[str], Path], num_threads: int) -> None:  # noqa: F811
    """Bit for bit."""
    decoder = load(folder("qwen3"), "float32", library)
    batch = batch_of(*chunks(), prompt(0, 100))
    wanted = run(decoder, make_kv(decoder), batch)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        found = run(decoder, make_kv(decoder), batch)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True))


def test_the_engine_takes_it(tiny_folder: Callable[[str], Path]) -> None:
    """A dense model's decodes are computed whole where there are kernels, and by its layers without."""
    if find_compiler() is None:
        pytest.skip("needs a C++ compiler: apt install g++")
    for native in (True, False):
        runner = load_tiny(tiny_folder("llama"), native=native)
        assert isinstance(runner.loaded.model, Decoder)
        assert (runner.loaded.model.native_step is not None) == native
        runner.close()


def test_what_was_chosen_without_kernels_does_not_keep_it_off(
    tiny_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler that is installed later makes the step native, whatever back end served before."""
    if find_compiler() is None:
        pytest.skip("needs a C++ compiler: apt install g++")
    monkeypatch.setattr(loader, "cache_folder", lambda: tmp_path)
    source = load_tiny(tiny_folder("llama"), native=False).loaded.source
    assert source.kept(torch.float32, None).write("onednn_fp32") == "onednn_fp32"
    model = load_tiny(tiny_folder("llama")).loaded.model
    assert isinstance(model, Decoder)
    assert model.native_step is not None
