"""A GGUF file's weights and config against those of the safetensors model that it was made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from streamserve.engine.model.load.errors import ModelLoadError, UnsupportedModel
from streamserve.engine.model.load.gguf.config import config_of
from streamserve.engine.model.load.gguf.file import GGUFFile
from streamserve.engine.model.load.gguf.weights import GGUFWeights
from tests.support.models.gguf_checkpoints import convert
from tests.support.models.model_driver import Driver, load_tiny, prompts
from tests.support.models.tiny_models import TINY, save_model

gguf = pytest.importorskip("gguf", reason="needs gguf: pip install gguf")

FULL = ["full_attention"] * 4
YARN = {
    "rope_type": "yarn",
    "rope_theta": 150_000.0,
    "factor": 32.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
GEMMA_3_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
# What GGUF files hold of each architecture: windows as its models have them, if at all.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-3": ("llama", {"rope_parameters": LLAMA_3}),
    "mixtral": ("mixtral", {"sliding_window": None, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("qwen2", {"use_sliding_window": False, "layer_types": FULL}),
    "qwen3": ("qwen3", {"use_sliding_window": False, "layer_types": FULL, "head_dim": 16}),
    "qwen3_moe": ("qwen3_moe", {**EXPERTS, "use_sliding_window": False}),
    "gemma": ("gemma", {"tie_word_embeddings": True}),
    "gemma2": ("gemma2", {"tie_word_embeddings": True, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 1.0,
                          "final_logit_softcapping": 5.0,
                          "sliding_window": 8}),
    "gemma3": ("gemma3_text", {"sliding_window": 8, "num_hidden_layers": 7, "layer_types": None,
                               "query_pre_attn_scalar": 8, "rope_parameters": GEMMA_3_ROPE}),
    "phi3": ("phi3", {"sliding_window": 16}),
    "granite": ("granite", {"attention_multiplier": 0.3, "embedding_multiplier": 2.0, "residual_multiplier": 0.5,
                            "logits_scaling": 4.0}),
    "olmo2": ("olmo2", {}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 1, 1, 0], "layer_types": FULL, "use_sliding_window": False}),
    "gpt_oss": ("gpt_oss", {"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
                            "rope_parameters": YARN}),
}  # fmt: skip


def saved(folder: Path, variant: str, **fields: Any) -> Path:
    """Save the variant's tiny model."""
    model_type, own = VARIANTS[variant]
    return save_model(folder, model_type, **{**own, **fields})


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_a_files_weights_are_the_checkpoints(variant: str, tmp_path: Path) -> None:
    """What llama.cpp's converter changes is undone: the same names, and the same numbers bit for bit."""
    folder = saved(tmp_path / "model", variant)
    weights = GGUFWeights(GGUFFile(convert(folder, tmp_path / "model.gguf")))
    wanted = load_file(folder / "model.safetensors")
    assert set(weights.names()) == set(wanted)
    for name, tensor in wanted.items():
        found = weights.tensor(name)
        limit = 1e-6 if "norm" in name and variant.startswith("gemma") else 0.0  # stored with 1 added
        assert found.shape == tensor.shape, name
        assert float((found - tensor).abs().max()) <= limit, name


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_a_files_config_computes_what_the_models_does(variant: str, tmp_path: Path) -> None:
    """transformers' code gives the same logits with the config of the file's metadata as with the model's own."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    folder = saved(tmp_path / "model", variant)
    file = GGUFFile(convert(folder, tmp_path / "model.gguf"))
    wanted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    config = AutoConfig.for_model(**config_of(file))
    found = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
        None, config=config, state_dict=GGUFWeights(file).lazily(), dtype=torch.float32, attn_implementation="eager"
    )
    tokens = torch.tensor(prompts(TINY["vocab_size"])[:1])
    with torch.inference_mode():
        difference = (found.eval()(tokens).logits - wanted(tokens).logits).abs().max()
    assert float(difference) < 1e-5


def test_the_engine_answers_from_a_file_as_from_its_folder(tmp_path: Path) -> None:
    """Greedy tokens of a float32 file are those of the folder that it was made of."""
    folder = saved(tmp_path / "model", "llama-3")
    path = convert(folder, tmp_path / "model.gguf")
    prompt = prompts(TINY["vocab_size"])[0]
    answers = []
    for source in (folder, path):
        runner = load_tiny(source)
        answers.append(Driver(runner).run([prompt], max_tokens=12, chunk=16))
        runner.close()
    assert answers[0] == answers[1]


@pytest.mark.parametrize("tensor_type", ["F16", "BF16", "Q8_0", "Q5_1", "Q4_0"])
def test_a_quantised_tensor_is_near_what_it_was(tensor_type: str, tmp_path: Path) -> None:
    """Quantised by the reference and read by us, rows turned back included, a weight is off by its rounding."""
    folder = saved(tmp_path / "model", "llama", hidden_size=64, intermediate_size=96, head_dim=16)
    weights = GGUFWeights(GGUFFile(convert(folder, tmp_path / "model.gguf", tensor_type)), torch.float32)
    limit = {"F16": 1e-3, "BF16": 1e-2, "Q8_0": 2e-2, "Q5_1": 8e-2, "Q4_0": 0.2}[tensor_type]
    for name, tensor in load_file(folder / "model.safetensors").items():
        error = float((weights.tensor(name) - tensor).norm() / tensor.norm())
        assert error <= limit, (name, error)


def test_the_dtype_suits_the_file(tmp_path: Path) -> None:
    """A float file's weights keep their type, those of a quantised file are bfloat16, and what they take is known."""
    folder = saved(tmp_path / "model", "llama", hidden_size=64, intermediate_size=96, head_dim=16)
    for tensor_type, dtype in (("F32", torch.float32), ("F16", torch.float16), ("Q8_0", torch.bfloat16)):
        weights = GGUFWeights(GGUFFile(convert(folder, tmp_path / f"{tensor_type}.gguf", tensor_type)))
        assert weights.dtype() is dtype
        total = sum(weights.tensor(name).nbytes for name in weights.names())
        assert weights.num_bytes() == total


def test_tensors_without_a_place_are_refused(tmp_path: Path) -> None:
    """A tensor that no weight is made of would be left out of the answer: the file is refused by its name."""
    folder = saved(tmp_path / "model", "llama")
    path = convert(folder, tmp_path / "model.gguf")
    data = path.read_bytes().replace(b"blk.1.ffn_down.weight", b"blk.1.ffn_gone.weight")
    path.write_bytes(data)
    with pytest.raises(UnsupportedModel, match=r"1 tensors that are not known of llama \(blk\.1\.ffn_gone\.weight\)"):
        GGUFWeights(GGUFFile(path))


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    """A file that lacks tensors of its layers is refused, not filled up."""
    folder = saved(tmp_path / "model", "llama")
    path = convert(folder, tmp_path / "model.gguf")
    name = b"output_norm.weight"
    path.write_bytes(path.read_bytes().replace(name, b"rope_freqs.weight\0"))
    with pytest.raises(ModelLoadError):
        load_tiny(path)


def test_other_factors_of_positions_are_refused(tmp_path: Path) -> None:
    """Factors that are not Llama 3's are refused: their config is not in the file."""
    folder = saved(tmp_path / "model", "llama", rope_parameters={**LLAMA_3, "low_freq_factor": 2.0}, head_dim=16)
    path = convert(folder, tmp_path / "model.gguf")
    with pytest.raises(UnsupportedModel, match=r"rope_freqs\.weight\) that are not Llama 3's"):
        config_of(GGUFFile(path))
