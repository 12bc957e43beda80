"""Models to measure: the repository's own, and "S", a random Llama of SmolLM2-135M's shape with a real tokenizer.

The tokenizer of S is a byte-level BPE of 49,152 tokens at most, trained on the sources of Python's standard library.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

from benchmarks.support.machine import progress

HELPDESK = Path(__file__).resolve().parents[2] / "project" / "demo_model" / "helpdesk"
MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def model_folder(name: str, parent: Path) -> tuple[Path, str]:
    """Return the folder and the dtype of a model: "helpdesk", "S" (made in `parent`, once), or any folder."""
    if name == "helpdesk":
        return HELPDESK, "float32"
    if name != "S":
        return Path(name), "auto"
    folder = parent / "S"
    if not (folder / "tokenizer.json").exists():
        _make(folder)
    return folder, "bfloat16"


def _make(folder: Path) -> None:
    from benchmarks.engine import SMOLLM2_135M, build_model

    progress("making S: random weights, and a tokenizer from the standard library")
    build_model(folder, "bfloat16", {**SMOLLM2_135M, "eos_token_id": 2})
    _make_tokenizer(folder, SMOLLM2_135M["vocab_size"])


def _make_tokenizer(folder: Path, vocab_size: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=MARKS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    tokenizer.train([str(path) for path in sources], trainer)
    saved = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=MARKS[0], eos_token=MARKS[2], pad_token=MARKS[0]
    )
    saved.chat_template = TEMPLATE
    saved.save_pretrained(folder)
