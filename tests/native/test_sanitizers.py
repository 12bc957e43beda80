"""The kernels read and write what they may, and nothing undefined: AddressSanitizer and UBSan over each level."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from streamserve.native.build import SOURCES, find_compiler
from streamserve.native.levels import LEVELS, Level, cpu_flags, usable_levels

CHECKS = Path(__file__).parent / "sanitized"
# A call's struct that has grown, filled by position here, is a warning of one kind or another.
WARNINGS = ("-Wall", "-Wextra", "-Werror")
OPTIONS = (
    "-std=c++17",
    *WARNINGS,
    "-Wno-uninitialized",  # GCC's own AVX-512 headers read what they leave undefined
    "-Wno-maybe-uninitialized",
    "-O0",  # a third of the compiler's time with -O1; the program runs for seconds
    "-g1",  # lines of code for a report; all of -g doubles the compiler's time
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    f"-I{SOURCES}",
)
# The pool's symbols are weak, so that the linker would leave libgomp out.
LINK = ("-fsanitize=address,undefined", "-Wl,--no-as-needed", "-lgomp", "-lm")
AARCH64 = "aarch64-linux-gnu-g++"

pytestmark = [
    pytest.mark.proof,  # some minutes of compiling
    pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler: apt install g++"),
]


@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name)
def test_the_sanitizers_find_nothing(level: Level, tmp_path: Path) -> None:
    """Odd shapes in buffers without a byte to spare, on several threads, and without memory."""
    if level not in usable_levels(cpu_flags()):
        pytest.skip("needs a processor with this level")
    compiler = find_compiler()
    assert compiler is not None
    sources = [*SOURCES.glob("*.cpp"), *CHECKS.glob("*.cpp")]
    objects = [tmp_path / f"{source.parent.name}-{source.stem}.o" for source in sources]

    def compile_file(source: Path, output: Path) -> None:
        subprocess.run([*compiler, *OPTIONS, *level.options, "-c", str(source), "-o", str(output)], check=True)

    with ThreadPoolExecutor(2) as pool:
        for job in [pool.submit(compile_file, *pair) for pair in zip(sources, objects, strict=True)]:
            job.result()
    program = tmp_path / "sanitized"
    subprocess.run([*compiler, *map(str, objects), *LINK, "-o", str(program)], check=True)
    env = {
        "ASAN_OPTIONS": "detect_leaks=0",  # the pool's threads live until the process ends, which is no leak of ours
        "OMP_WAIT_POLICY": "PASSIVE",  # threads that spin take nine tenths of its time
    }
    done = subprocess.run([program], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("source", sorted(SOURCES.glob("*.cpp")), ids=lambda source: source.stem)
def test_the_sources_compile_for_aarch64(source: Path) -> None:
    """The generic level is plain C++."""
    try:
        subprocess.run([AARCH64, "-std=c++17", "-fsyntax-only", *WARNINGS, str(source)], check=True)
    except FileNotFoundError:
        pytest.skip(f"needs {AARCH64}: apt install g++-aarch64-linux-gnu")
