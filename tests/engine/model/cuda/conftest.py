"""Triton's kernels without a GPU: on a CPU by its interpreter."""

from __future__ import annotations

import os

import pytest

# Triton reads it where a kernel is defined. Nothing else in these tests' process runs Triton.
os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="needs Triton: pip install -r tests/requirements.txt")
