"""What every benchmark says of the machine it ran on, and how it shows that it is still at work."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from pathlib import Path


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help is the module's docstring."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def describe_machine() -> str:
    """Return processor, kernels it has, Python, and how busy it is now: above one a core, others are at work too."""
    load = os.getloadavg()[0]
    return f"{processor()}, {os.cpu_count()} cores, python {platform.python_version()}, load average {load:.1f}"


def processor() -> str:
    """Return the processor's own name, and which of the instructions that matter here it has."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    flags = next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), [])
    known = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
    return f"{names[0] if names else platform.processor()} ({', '.join(known)})"


def progress(text: str) -> None:
    """Say what is being done, on stderr, so that stdout holds the figures alone."""
    print(f"  ... {text}", file=sys.stderr, flush=True)
