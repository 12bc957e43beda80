"""A model folder whose weights no machine holds: its file has their shapes, and no data."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

HELPDESK = Path(__file__).resolve().parents[3] / "project" / "demo_model" / "helpdesk"


def large_model(folder: Path, num_bytes: int) -> Path:
    """Write the demo model with weights that take so many bytes in bfloat16."""
    shutil.copytree(HELPDESK, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    weight = {"dtype": "BF16", "shape": [num_bytes // 2], "data_offsets": [0, num_bytes]}
    header = json.dumps({"model.embed_tokens.weight": weight}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    return folder
