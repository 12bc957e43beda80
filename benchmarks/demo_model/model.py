"""The demo model: its shape, initial weights, loss and export.

A plain Llama (transformers' own classes), which any engine for Llama loads. Works on token ids only.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer
    from transformers import LlamaForCausalLM

    from benchmarks.demo_model.batches import Batch

MAX_LEN = 2048
# Embeddings are tied to the output head; a matrix start of d^-0.5 would drown them (measured in an earlier try).
_MATRIX_STD, _EMBEDDING_STD = 0.02, 0.04


def build_model(tokenizer: "Tokenizer", seed: int) -> "LlamaForCausalLM":
    """Return a new model with about 3.5 M parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from benchmarks.demo_model.tokens import BOS, END, PAD, VOCAB_SIZE

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=MAX_LEN,
        initializer_range=_MATRIX_STD,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.token_to_id(BOS),
        eos_token_id=tokenizer.token_to_id(END),
        pad_token_id=tokenizer.token_to_id(PAD),
    )
    model = LlamaForCausalLM(config)
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=_EMBEDDING_STD)
    return model


def has_fast_bf16() -> bool:
    """Return whether the CPU multiplies bf16 in hardware; otherwise PyTorch emulates it, far slower than fp32."""
    import torch

    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def answer_loss(model: "LlamaForCausalLM", batch: "Batch") -> "torch.Tensor":
    """Return the mean cross entropy of the assistant's tokens; the head runs only on the positions before them."""
    import torch

    with torch.autocast("cpu", torch.bfloat16, enabled=has_fast_bf16()):
        hidden = model.model(input_ids=batch.input_ids, use_cache=False).last_hidden_state
        # position:   0    1    2         the hidden state at t predicts the token at t + 1
        # hidden:   [h0,  h1]   --
        # target:    --  [t1,  t2]
        is_target = batch.is_learned[:, 1:]
        logits = model.lm_head(hidden[:, :-1][is_target])  # (num_targets, vocab_size)
    return torch.nn.functional.cross_entropy(logits.float(), batch.input_ids[:, 1:][is_target])


def export(model: "LlamaForCausalLM", tokenizer: "Tokenizer", folder: Path, record: dict[str, Any]) -> None:
    """Write bf16 safetensors, configs, tokenizer and `training.json` to `folder`."""
    import copy

    import torch
    from transformers import GenerationConfig

    from benchmarks.demo_model.tokens import wrap_tokenizer

    saved = copy.deepcopy(model).to(torch.bfloat16)
    config = saved.config
    saved.generation_config = GenerationConfig(
        do_sample=True,
        temperature=0.3,
        top_p=0.9,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )
    saved.save_pretrained(folder)
    wrap_tokenizer(tokenizer, MAX_LEN).save_pretrained(folder)
    (folder / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
