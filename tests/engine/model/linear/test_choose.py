"""A back end is taken where it is right, and the same again after a restart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from streamserve.engine.model.linear import choose as room
from streamserve.engine.model.linear.base import PLAIN, BackEnd, DoesNotFit, PlainLinear
from streamserve.engine.model.linear.choose import LinearMaker, agrees, choose, fastest, is_right
from streamserve.engine.model.linear.kept import Kept

CPU = torch.device("cpu")


class Slow(PlainLinear):
    """Computes the same twenty times."""

    name = "slow"

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            out = super().__call__(inputs)
        return out


class Wrong(PlainLinear):
    """Computes something else."""

    name = "wrong"

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().__call__(inputs) * 1.1


class Broken(PlainLinear):
    """Takes no weight."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        raise DoesNotFit("never")


def back_end_of(kind: Any, name: str) -> BackEnd:
    return replace(PLAIN, name=name, make=kind)


SLOW, FAST = back_end_of(Slow, "slow"), back_end_of(PlainLinear, "fast")


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave a slow back end and a fast one."""
    monkeypatch.setattr(room, "BACK_ENDS", (SLOW, FAST))
    monkeypatch.setattr(room, "LEAST_BYTES", 1)


def weights() -> list[torch.Tensor]:
    return [torch.randn(64, 48) for _ in range(3)]


def test_the_fastest_is_taken_and_kept(two: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is measured once: the next start reads the name."""
    kept = Kept(tmp_path / "cache", "model a", torch.float32)
    assert choose(torch.float32, CPU, weights(), kept).back_end is FAST
    assert kept.read() == "fast"
    assert (kept.file.parent.stat().st_mode & 0o777) == 0o700
    monkeypatch.setattr(room, "fastest", None)
    assert choose(torch.float32, CPU, weights(), kept).back_end is FAST


def test_what_is_kept_wins(two: None, tmp_path: Path) -> None:
    """An answer that continues after a restart continues with the same arithmetic, whatever is fast by then."""
    kept = Kept(tmp_path, "model a", torch.float32)
    assert kept.write("slow") == "slow"
    assert choose(torch.float32, CPU, weights(), kept).back_end is SLOW
    assert kept.write("fast") == "slow"  # the first to write wins


def test_another_model_is_measured_for_itself(tmp_path: Path) -> None:
    """Model, dtype and threads are part of the name."""
    files = {Kept(tmp_path, model, dtype).file for model in "ab" for dtype in (torch.float32, torch.bfloat16)}
    assert len(files) == 4


def test_a_library_is_a_new_choice(two: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was kept without native kernels, or with other ones, does not hold where they are."""
    without, native = (Kept(tmp_path, "m", torch.float32, library) for library in ("", "avx2-0123"))
    assert without.write("slow") == "slow"
    preferred = [replace(FAST, name="native")]
    assert choose(torch.float32, CPU, weights(), native, preferred=preferred).back_end is not SLOW
    assert Kept(tmp_path, "m", torch.float32, "avx2-4567").read() is None
    assert choose(torch.float32, CPU, weights(), without).back_end is SLOW


def test_nothing_is_measured_that_cannot_be_kept(two: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a folder of ours the first in order is taken: it is the same at the next start."""
    assert choose(torch.float32, CPU, weights()).back_end is SLOW
    (tmp_path / "file").write_text("")
    assert choose(torch.float32, CPU, weights(), Kept(tmp_path / "file", "m", torch.float32)).back_end is SLOW
    open_folder = tmp_path / "open" / "linear"
    open_folder.mkdir(parents=True)
    open_folder.chmod(0o777)
    assert choose(torch.float32, CPU, weights(), Kept(tmp_path / "open", "m", torch.float32)).back_end is SLOW
    assert list(open_folder.iterdir()) == []


def test_a_small_model_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its times would be noise."""
    monkeypatch.setattr(room, "BACK_ENDS", (SLOW, FAST))
    kept = Kept(tmp_path, "m", torch.float32)
    assert choose(torch.float32, CPU, weights(), kept).back_end is SLOW
    assert kept.read() is None


def test_the_first_stays_unless_another_is_clearly_better(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that take as long do not change places by noise."""
    monkeypatch.setattr(room, "MARGIN", 0.5)
    assert fastest([FAST, replace(FAST, name="as fast")], weights()) == "fast"


def test_what_a_busy_machine_says_is_not_kept(two: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each measurement that another program disturbs is taken again; where none is left, the first serves this load."""
    switches = iter(range(10_000))
    monkeypatch.setattr(room, "_num_involuntary_switches", lambda: next(switches))
    kept = Kept(tmp_path, "m", torch.float32)
    assert choose(torch.float32, CPU, weights(), kept).back_end is SLOW
    assert kept.read() is None
    counts = iter([0, 1] * 9 * room.ROUNDS + [1] * 10_000)  # of the first rounds, all are disturbed
    monkeypatch.setattr(room, "_num_involuntary_switches", lambda: next(counts))
    assert choose(torch.float32, CPU, weights(), kept).back_end is FAST
    assert kept.read() == "fast"


def test_whole_steps_outweigh_what_linears_lose(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linears alone are measured: with whole steps as the prize, another must be better by more."""
    steps = replace(SLOW, makes_steps=True)
    monkeypatch.setattr(room, "STEP_MARGIN", 0.0)
    assert fastest([steps, FAST], weights()) == "slow"
    monkeypatch.setattr(room, "STEP_MARGIN", 0.5)
    assert fastest([steps, FAST], weights()) == "fast"


def test_a_wrong_back_end_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it is said to serve, numbers decide: for the machine, and for each weight."""
    wrong = back_end_of(Wrong, "wrong")
    assert not is_right(wrong, torch.float32, CPU)
    monkeypatch.setattr(room, "BACK_ENDS", (wrong,))
    assert choose(torch.float32, CPU, weights()).back_end is PLAIN
    weight = torch.randn(5, 7)
    assert type(LinearMaker(back_end=wrong).make(weight)) is PlainLinear
    assert agrees(PlainLinear(weight, None), weight, None)
    assert not agrees(Wrong(weight, None), weight, None)


def test_a_weight_that_does_not_fit_is_left_plain() -> None:
    """One weight out of range costs its own layer's speed, no more."""
    assert type(LinearMaker(back_end=back_end_of(Broken, "broken")).make(torch.randn(5, 7))) is PlainLinear


def test_a_weight_that_memory_does_not_hold_twice_is_left_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A packed copy of a weight that stays is made only where there is room for it."""
    maker, weight = LinearMaker(back_end=SLOW), torch.randn(64, 64)
    monkeypatch.setattr(room, "available_memory", lambda: 100_000)
    assert type(maker.make(weight)) is Slow
    assert type(maker.make(weight, is_kept=True)) is PlainLinear


def test_devices_and_dtypes_without_one() -> None:
    """Packing is for CPUs, and for the dtypes it was tested in."""
    assert choose(torch.float32, torch.device("meta"), []).back_end is PLAIN
    assert choose(torch.float64, CPU, []).back_end is PLAIN
