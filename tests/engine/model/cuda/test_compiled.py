"""The Triton kernels compile for the GPUs that they are for."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.engine.model.cuda.compiled import CAPABILITIES


@pytest.mark.proof
def test_all_kernels_compile() -> None:
    """In a process of its own, as the interpreter's functions cannot be compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.model.cuda.compiled"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert len(lines) == 9 * len(CAPABILITIES), done.stdout
    print(done.stdout)
