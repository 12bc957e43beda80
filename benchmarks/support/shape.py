"""Models to measure: the repository's own, and random weights of known shapes with a real tokenizer.

`S` is a Llama of SmolLM2-135M's shape; `tiny` is for smoke tests. Their tokenizer is a byte-level BPE trained on the
sources of Python's standard library. What is missing of the vocabulary's size is filled with words that no text merges
to, so that each id which random weights draw is text.
"""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path
from typing import Any

from benchmarks.support.machine import progress

HELPDESK = Path(__file__).resolve().parents[2] / "project" / "demo_model" / "helpdesk"
MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_IDS = {"bos_token_id": 0, "eos_token_id": 2, "max_position_embeddings": 8192, "tie_word_embeddings": True}
_QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_theta": 1_000_000.0,
}
SHAPES: dict[str, dict[str, Any]] = {
    "S": {
        "model_type": "llama",
        "vocab_size": 49_152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "rope_theta": 100_000.0,
    },
    "qwen3-0.6b": {**_QWEN3, "hidden_size": 1024, "intermediate_size": 3072},
    "qwen3-1.7b": {**_QWEN3, "hidden_size": 2048, "intermediate_size": 6144},
    "tiny": {
        "model_type": "llama",
        "vocab_size": 2048,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}


def model_folder(name: str, parent: Path) -> tuple[Path, str]:
    """Return the folder and the dtype of a model: "helpdesk", a shape (made in `parent`, once), or any folder."""
    if name == "helpdesk":
        return HELPDESK, "float32"
    if name not in SHAPES:
        return Path(name), "auto"
    folder = parent / name
    if not (folder / "tokenizer.json").exists():
        _make(folder, SHAPES[name])
    return folder, "bfloat16"


def _make(folder: Path, shape: dict[str, Any]) -> None:
    from benchmarks.engine import build_model

    progress(f"making {folder.name}: random weights, and a tokenizer from the standard library")
    build_model(folder, "bfloat16", {**shape, **_IDS})
    _make_tokenizer(folder, shape["vocab_size"])


def _make_tokenizer(folder: Path, vocab_size: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(vocab_size, 49_152),
        special_tokens=MARKS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[: vocab_size // 128]  # a few for a few tokens
    tokenizer.train([str(path) for path in sources], trainer)
    saved = PreTrainedTokenizerFast(
        tokenizer_object=_filled(tokenizer, vocab_size), bos_token=MARKS[0], eos_token=MARKS[2], pad_token=MARKS[0]
    )
    saved.chat_template = TEMPLATE
    saved.save_pretrained(folder)


def _filled(tokenizer: Any, vocab_size: int) -> Any:
    """Return the tokenizer with a word for each id that it lacks."""
    content = json.loads(tokenizer.to_str())
    vocab = content["model"]["vocab"]
    vocab |= {f"Ġ#{token_id}": token_id for token_id in range(len(vocab), vocab_size)}
    return type(tokenizer).from_str(json.dumps(content))
