"""The public Node clients of tests/e2e/frontends: scripts that read our streams with them.

Where Node or its packages are missing (`make frontends`) the tests skip, or fail where STREAMSERVE_REQUIRE=all.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.servers.web_servers import ROOT

FRONT_ENDS = ROOT / "tests" / "e2e" / "frontends"
_SECONDS = 120


def node_of_tests() -> str:
    """Return the path of Node, where it and the packages of tests/e2e/frontends are there; else skip."""
    node = shutil.which("node")
    if node is None or not (FRONT_ENDS / "node_modules").is_dir():
        missing = "node is not installed" if node is None else "run `make frontends`: its packages are not installed"
        if os.environ.get("STREAMSERVE_REQUIRE") == "all":
            pytest.fail(missing)
        pytest.skip(missing)
    return node


def run_script(script: Path, *arguments: str, env: Mapping[str, str] | None = None) -> Any:
    """Run a script of tests/e2e/frontends, and return the JSON that is the last line of what it prints."""
    command = [node_of_tests(), str(script), *arguments]
    done = subprocess.run(
        command,
        env={**os.environ, "NO_PROXY": "*", **(env or {})},
        cwd=FRONT_ENDS,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return json.loads(done.stdout.splitlines()[-1])


def bundle(entry: Path, folder: Path) -> Path:
    """Bundle a page's script with its packages by esbuild; return the bundle, a classic script, in `folder`."""
    node_of_tests()
    out = folder / f"{entry.stem}.js"
    esbuild = FRONT_ENDS / "node_modules" / ".bin" / "esbuild"
    options = ["--bundle", "--format=iife", "--jsx=automatic", '--define:process.env.NODE_ENV="production"']
    done = subprocess.run(
        [str(esbuild), str(entry), *options, f"--outfile={out}", "--log-level=error"],
        env={**os.environ, "NODE_PATH": str(FRONT_ENDS / "node_modules")},  # of an entry that lies elsewhere
        cwd=FRONT_ENDS,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return out
