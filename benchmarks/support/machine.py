"""The description of the machine that every benchmark prints, and its progress lines."""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
from pathlib import Path


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help is the module's docstring. Then SIGTERM ends the benchmark's servers with it."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def describe_machine() -> str:
    """Return processor, instruction sets, cores, Python and load average; above one per core the machine is busy."""
    load = os.getloadavg()[0]
    return f"{processor()}, {os.cpu_count()} cores, python {platform.python_version()}, load average {load:.1f}"


def processor() -> str:
    """Return the processor's name and its relevant instruction sets."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    flags = next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), [])
    known = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
    return f"{names[0] if names else platform.processor()} ({', '.join(known)})"


def progress(text: str) -> None:
    """Print a progress line to stderr, so that stdout has only the results."""
    print(f"  ... {text}", file=sys.stderr, flush=True)
