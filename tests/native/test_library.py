"""The library shares torch's threads, and one of another version is refused."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from streamserve.native import library as loading
from streamserve.native.build import NativeUnavailable
from streamserve.native.library import Library, mapped_openmp
from tests.support.processes import threads_of

torch = pytest.importorskip("torch", reason="needs torch: pip install streamserve[engine]")


def test_there_is_one_openmp_runtime(library: Library) -> None:
    """No second libgomp comes with the library, and a region has as many threads as are asked for."""
    torch.ones(4).sum()
    # scikit-learn, which another test may have imported, has a copy of its own under another name.
    assert len([one for one in mapped_openmp() if "scikit_learn" not in one]) == 1
    for num_threads in (1, 2, 3):
        assert library.team_size(num_threads) == num_threads


def test_a_region_runs_on_torchs_threads(library: Library) -> None:
    """A region after one of torch's starts no thread: both use one pool."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        torch.randn(1 << 20).exp_()
        threads = threads_of("self")
        assert library.team_size(3) == 3
        assert threads_of("self") <= threads
    finally:
        torch.set_num_threads(before)


def test_the_self_check_passes(library: Library) -> None:
    """The check that a fresh library must pass holds in this process too."""
    assert library.self_check() == 0


def test_a_library_of_another_version_is_refused(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its functions might take other arguments."""
    monkeypatch.setattr(loading, "ABI_VERSION", loading.ABI_VERSION + 1)
    with pytest.raises(NativeUnavailable, match="version"):
        Library(library.path, library.level)


def test_what_is_no_library_is_refused(library: Library, tmp_path: Path) -> None:
    """A file that cannot be loaded is a reason, not a crash."""
    (tmp_path / "x.so").write_text("no library")
    with pytest.raises(NativeUnavailable, match="loaded"):
        Library(tmp_path / "x.so", library.level)


def test_an_unknown_function_is_an_attribute_error(library: Library) -> None:
    """The functions are those of the table."""
    with pytest.raises(AttributeError, match="fly"):
        library.fly()


def test_a_thread_of_its_own_may_call(library: Library) -> None:
    """The engine calls from its own thread."""
    sizes: list[int] = []
    thread = threading.Thread(target=lambda: sizes.append(library.team_size(2)))
    thread.start()
    thread.join()
    assert sizes == [2]
