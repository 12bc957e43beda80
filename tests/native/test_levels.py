"""A processor is given the best instruction set that it has, and no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamserve.native.levels import LEVELS, cpu_flags, usable_levels

AVX2 = {"sse2", "avx", "avx2", "fma", "f16c"}
VNNI = AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"}


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (set(), "generic"),
        (AVX2, "avx2"),
        (AVX2 - {"fma"}, "generic"),
        (VNNI, "avx512"),
        (VNNI | {"avx512_bf16"}, "avx512_bf16"),
        (VNNI - {"avx512_vnni"}, "avx2"),
        ((VNNI | {"avx512_bf16"}) - {"f16c"}, "generic"),
    ],
)
def test_a_processor_without_a_flag_of_a_level_gets_a_lower_level(flags: set[str], name: str) -> None:
    """The first level is the best whose flags are all there."""
    assert usable_levels(flags, "x86_64")[0].name == name


def test_another_architecture_gets_the_generic_level() -> None:
    """Flags that look like x86's mean nothing elsewhere."""
    assert [level.name for level in usable_levels(VNNI, "aarch64")] == ["generic"]


def test_every_level_but_the_generic_names_its_flags() -> None:
    """A level without flags would be chosen everywhere."""
    assert [level.name for level in LEVELS if not level.flags] == ["generic"]


def test_flags_are_read_as_linux_writes_them(tmp_path: Path) -> None:
    """The first `flags` line counts; a file without, or no file, has none."""
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nflags\t\t: fpu avx2 fma\n\nprocessor\t: 1\nflags\t\t: fpu\n")
    assert cpu_flags(file) == {"fpu", "avx2", "fma"}
    file.write_text("processor\t: 0\nFeatures\t: fp asimd\n")
    assert cpu_flags(file) == frozenset()
    assert cpu_flags(tmp_path / "none") == frozenset()
