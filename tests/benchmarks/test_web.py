"""Laws of `benchmarks.web`: which part of a web process's CPU a function is counted with."""

from __future__ import annotations

import cProfile
import pstats
from pathlib import Path

import pytest

import streamserve
from benchmarks.web.parts import OTHER, PARTS, part_of, report_parts
from streamserve.protocol.events import Token
from streamserve.protocol.frames import decode_event, encode_event

ROOT = Path(streamserve.__file__).parent


@pytest.mark.parametrize("folder", ["streams", "asgi", "clients/process", "dialects", "protocol"])
def test_each_file_on_the_way_of_a_token_has_a_part(folder: str) -> None:
    """No file that a token crosses in the web process is counted as other."""
    paths = [path for path in (ROOT / folder).rglob("*.py") if path.name != "__init__.py"]
    ours = {str(path): part_of(str(path)) for path in paths}
    unknown = [path for path, part in ours.items() if part == OTHER]
    assert {Path(path).parent.name for path in unknown} <= {"streams", "lease"}, "what no token crosses"
    assert set(ours.values()) <= {OTHER, *(part for part, _ in PARTS)}


def test_shares_add_up_to_what_was_profiled(capsys: pytest.CaptureFixture[str]) -> None:
    """What a function calls in C is counted with it, and the parts' shares are those of the given CPU."""
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(100):
        decode_event(encode_event(Token(text="word", token_ids=(1,))))
    profile.disable()
    stats = pstats.Stats(profile)
    report_parts(stats, stats.total_tt, 100)  # type: ignore[attr-defined]
    lines = capsys.readouterr().out.splitlines()
    shares = [float(line.split()[-1].rstrip("%")) for line in lines if line.endswith("%")]
    assert sum(shares) == pytest.approx(100.0, abs=1.0)
    frames = next(line for line in lines if line.lstrip().startswith("engine's frames"))
    assert float(frames.split()[-1].rstrip("%")) > 50.0
