"""A library is compiled once, by this user's compiler, into a folder of this user's alone; else there is a reason."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from streamserve.native import build as building
from streamserve.native.build import (
    NativeUnavailable,
    build,
    default_cache,
    find,
    find_compiler,
    obstacle,
    prebuilt_name,
)
from streamserve.native.levels import GENERIC, Level, best_level
from streamserve.native.library import open_library
from tests.native.conftest import command

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler: apt install g++")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Compile only the file that every library has, and none of the wheel's libraries are there."""
    sources = tmp_path / "sources"
    sources.mkdir()
    for path in [*building.SOURCES.glob("*.h"), building.SOURCES / "abi.cpp"]:
        shutil.copy(path, sources)
    monkeypatch.setattr(building, "SOURCES", sources)
    monkeypatch.setattr(building, "PREBUILT", tmp_path / "prebuilt")


@needs_compiler
def test_a_library_is_compiled_once(tmp_path: Path) -> None:
    """The second start finds the file of the first, and only its owner can read the folder."""
    cache, fractions = tmp_path / "cache", []
    path = build(best_level(), cache, fractions.append)
    before = path.stat()
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    assert build(best_level(), cache) == path == find(best_level(), cache)
    assert path.stat() == before
    assert cache.stat().st_mode & 0o777 == 0o700
    assert {file.name for file in cache.iterdir()} == {path.name, "lock"}


@needs_compiler
def test_a_changed_source_makes_a_new_library(tmp_path: Path) -> None:
    """What was compiled from other sources is not found."""
    build(GENERIC, tmp_path / "cache")
    with (building.SOURCES / "abi.cpp").open("a") as file:
        file.write("// changed\n")
    assert find(GENERIC, tmp_path / "cache") is None


@needs_compiler
def test_two_that_start_at_a_time_compile_once(tmp_path: Path) -> None:
    """The second waits for the first and takes its file."""
    log = tmp_path / "log"
    log.touch()
    compiler = command(tmp_path, "cxx", f'case "$*" in *-shared*) echo link >> {log};; esac; exec g++ "$@"')
    with ThreadPoolExecutor(2) as pool:
        jobs = [
            pool.submit(build, GENERIC, tmp_path / "cache", environment={**os.environ, "CXX": compiler})
            for _ in range(2)
        ]
        assert len({job.result() for job in jobs}) == 1
    assert log.read_text() == "link\n"


@needs_compiler
def test_nothing_is_in_the_way_of_a_compiler(tmp_path: Path) -> None:
    """A cache that does not exist yet is made; one with a library needs no compiler any more."""
    assert obstacle(GENERIC, tmp_path / "cache") is None
    path = build(GENERIC, tmp_path / "cache")
    nowhere = {"PATH": str(tmp_path)}
    assert obstacle(GENERIC, tmp_path / "cache", nowhere) is None
    assert find(GENERIC, tmp_path / "cache", nowhere) == path


def test_without_a_compiler_the_message_says_what_to_install(tmp_path: Path) -> None:
    """An empty path has no compiler; the check says the same."""
    with pytest.raises(NativeUnavailable, match="install g\\+\\+"):
        build(GENERIC, tmp_path / "cache", environment={"PATH": str(tmp_path)})
    assert "install g++" in str(obstacle(GENERIC, tmp_path / "cache", {"PATH": str(tmp_path)}))


@pytest.mark.parametrize("script", ["echo 'x.cpp:1: error: no' >&2; exit 1", "exit 0", "kill -SEGV $$"])
def test_a_broken_compiler_leaves_no_library(tmp_path: Path, script: str) -> None:
    """Neither a complaint, nor silence without a file, nor a crash of the compiler is taken for a library."""
    environment = {**os.environ, "CXX": command(tmp_path, "cxx", script)}
    with pytest.raises(NativeUnavailable):
        build(GENERIC, tmp_path / "cache", environment=environment)
    assert find(GENERIC, tmp_path / "cache", environment) is None


def test_a_cache_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    """A full disk, or a lock file of another user, is a reason to do without the kernels, not to fail a load."""
    environment = {**os.environ, "CXX": command(tmp_path, "cxx", "exit 0")}
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    (cache / "lock").mkdir()
    with pytest.raises(NativeUnavailable, match=f"the cache {cache} cannot be written to"):
        build(GENERIC, cache, environment=environment)


@needs_compiler
def test_a_library_that_computes_wrongly_is_not_kept(tmp_path: Path) -> None:
    """The self-check runs in a process of its own, so that a crash there is a reason like others."""
    source = building.SOURCES / "abi.cpp"
    source.write_text(source.read_text().replace("int ss_self_check() {", "int ss_self_check() {\n  __builtin_trap();"))
    with pytest.raises(NativeUnavailable, match="self-check"):
        build(GENERIC, tmp_path / "cache")
    assert find(GENERIC, tmp_path / "cache") is None


@needs_compiler
def test_a_cache_from_another_processor_is_not_loaded(tmp_path: Path) -> None:
    """A library for flags that this processor lacks is in the cache: it is not what is found, and nothing runs it."""
    other = Level("other", frozenset({"a-flag-of-tomorrow"}), ())
    build(other, tmp_path / "cache")
    with pytest.raises(NativeUnavailable, match="not compiled yet"):
        open_library(compiles=False, cache=tmp_path / "cache")
    assert build(best_level(), tmp_path / "cache").name.startswith(best_level().name)


@needs_compiler
@pytest.mark.parametrize("kind", ["open to all", "a link", "a file"])
def test_a_cache_that_is_not_ours_alone_is_refused(tmp_path: Path, kind: str) -> None:
    """What is in the folder is run, so that it must be a real folder that others cannot write to."""
    cache = tmp_path / "cache"
    if kind == "a file":
        cache.touch()
    else:
        target = cache if kind == "open to all" else tmp_path / "elsewhere"
        target.mkdir(mode=0o700)
        target.chmod(0o777 if kind == "open to all" else 0o700)
        if kind == "a link":
            cache.symlink_to(target)
    assert find(GENERIC, cache) is None
    assert "alone" in str(obstacle(GENERIC, cache))
    with pytest.raises(NativeUnavailable, match="cache"):
        build(GENERIC, cache)


@needs_compiler
def test_a_library_of_the_wheel_needs_no_compiler(tmp_path: Path) -> None:
    """The wheel's file is found by its sources and level."""
    building.main(str(building.PREBUILT))
    found = find(best_level(), tmp_path / "cache", {"PATH": str(tmp_path)})
    assert found == building.PREBUILT / prebuilt_name(best_level())


def test_the_cache_is_the_users_or_temporary(tmp_path: Path) -> None:
    """A user without a home that can be written to has a folder with the user's number."""
    assert default_cache({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "streamserve" / "native"
    assert default_cache({"HOME": str(tmp_path)}) == tmp_path / ".cache" / "streamserve" / "native"
    assert default_cache({}).name == f"streamserve-native-{os.geteuid()}"
    (tmp_path / "file").touch()
    assert default_cache({"HOME": str(tmp_path / "file")}).name == f"streamserve-native-{os.geteuid()}"
