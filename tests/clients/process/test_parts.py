"""Laws of the parts of an engine process that need no engine: place, spec, failures, watchdog."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from streamserve.clients.process import server as host
from streamserve.clients.process.config import config_from_json, config_hash, config_to_json, dated
from streamserve.clients.process.messages import Hello, Welcome, is_replaced
from streamserve.clients.process.paths import (
    EnginePathError,
    engine_paths,
    is_locked,
    listening,
    locked,
    open_log,
    prepare_folder,
)
from streamserve.clients.process.supervision import CircuitBreaker, Watchdog
from streamserve.engine.config import EngineConfig, LatencyClass, ModelConfig
from streamserve.protocol.stats import EngineStats
from tests.support.engine_processes import spec_in


def test_a_spec_survives_json(folder: Path) -> None:
    """The engine gets exactly the worker's config."""
    classes = {"chat": LatencyClass(ttft_seconds=0.3, pace=9.0)}
    spec = dated(spec_in(folder, engine=EngineConfig(classes=classes, num_blocks=7), idle_seconds=3.0))
    assert config_from_json(config_to_json(spec)) == spec
    default = spec_in(folder, engine=EngineConfig())
    assert config_from_json(config_to_json(default)) == default


def test_the_hash_is_of_what_the_engine_computes_with(folder: Path) -> None:
    """The hash covers model and engine config, not timeouts or number formats, and is equal on both sides."""
    spec = spec_in(folder)
    assert config_hash(spec) == config_hash(replace(spec, idle_seconds=1.0, made_at=3.0, site="x"))
    assert config_hash(spec) == config_hash(replace(spec, engine=replace(spec.engine, step_seconds=12)))
    assert config_hash(spec) == config_hash(config_from_json(config_to_json(spec)))
    assert config_hash(spec) != config_hash(replace(spec, engine=replace(spec.engine, lead_tokens=1)))
    assert config_hash(spec) != config_hash(replace(spec, model=ModelConfig(alias="echo", path="x")))


@pytest.mark.parametrize(
    ("is_equal", "worker_made_at", "expected"), [(True, 9.0, False), (False, 9.0, True), (False, 5.0, False)]
)
def test_only_younger_and_other_settings_replace(is_equal: bool, worker_made_at: float, expected: bool) -> None:
    """Equal settings and older ones never replace the engine."""
    welcome = Welcome(protocol=1, config_hash="a", made_at=5.0, pid=1, started_at=8.0)
    hello = Hello(protocol=1, config_hash="a" if is_equal else "b", made_at=worker_made_at)
    assert is_replaced(welcome, hello) is expected


def test_the_paths_depend_on_site_and_alias_alone(folder: Path) -> None:
    """Workers with different settings meet; different models and sites do not."""
    spec = spec_in(folder)
    assert engine_paths(spec) == engine_paths(replace(spec, engine=EngineConfig(), made_at=1.0))
    other = replace(spec, model=ModelConfig(alias="a/../b", path="echo"))
    assert engine_paths(spec).socket != engine_paths(other).socket != engine_paths(replace(other, site="x")).socket
    assert engine_paths(other).log.parent == folder


def test_without_a_folder_it_is_ours_among_the_temporary_ones(folder: Path) -> None:
    """The default folder is one per user."""
    expected = Path(tempfile.gettempdir()) / f"streamserve-{os.geteuid()}"
    assert engine_paths(spec_in(folder, runtime_dir="")).socket.parent == expected


def test_a_folder_that_others_can_write_is_refused(folder: Path) -> None:
    """A folder with wrong permissions, or a link, is refused."""
    place = engine_paths(spec_in(folder))
    run = folder / "run"
    prepare_folder(place)
    prepare_folder(place)
    run.chmod(0o770)
    with pytest.raises(EnginePathError, match="0700"):
        prepare_folder(place)
    run.chmod(0o700)
    run.rename(folder / "elsewhere")
    run.symlink_to(folder / "elsewhere")
    with pytest.raises(EnginePathError, match="0700"):
        prepare_folder(place)


def test_a_path_too_long_for_a_socket_is_named(folder: Path) -> None:
    """The error names the limit of a socket path."""
    with pytest.raises(EnginePathError, match="107"):
        prepare_folder(engine_paths(spec_in(folder, runtime_dir=f"{folder}/{'x' * 90}")))


def test_one_holds_the_lock_and_others_see_it(folder: Path) -> None:
    """For as long as it is held."""
    place = engine_paths(spec_in(folder))
    prepare_folder(place)
    assert not is_locked(place)
    with locked(place) as first, locked(place) as second:
        assert first
        assert not second
        assert is_locked(place)
    assert not is_locked(place)


def test_a_process_without_the_lock_ends_without_failure(folder: Path) -> None:
    """It ends with 0 and leaves the winner's socket alone."""
    place = engine_paths(spec_in(folder))
    prepare_folder(place)
    with locked(place), listening(place):
        assert host.run(spec_in(folder)) == 0
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(place.socket))


def test_a_long_log_is_put_aside(folder: Path) -> None:
    """One that is short is added to."""
    place = engine_paths(spec_in(folder))
    for text in (b"a", b"b"):
        with open_log(place) as log:
            log.write(text)
    assert place.log.read_bytes() == b"ab"
    with place.log.open("wb") as log:
        log.truncate(9 * 1024 * 1024)
    open_log(place).close()
    assert place.log.stat().st_size == 0
    assert (folder / "engine-echo.log.1").stat().st_size == 9 * 1024 * 1024


def test_failures_are_given_up_within_the_window_only() -> None:
    """Three within ten seconds; the pauses before that grow."""
    failures, pauses = CircuitBreaker(3, 10.0), []
    for at in (0.0, 6.0, 12.0):
        failures.note(at)
        pauses.append(failures.pause())
    assert not failures.is_open
    assert pauses[0] < pauses[1] == pauses[2] < 10.0
    failures.note(13.0)
    assert failures.is_open
    assert failures.pause() == 10.0


def test_after_giving_up_one_failure_is_enough_for_a_while() -> None:
    """Half open: the try that follows has to hold."""
    failures = CircuitBreaker(3, 10.0)
    failures.trip(0.0)
    failures.note(11.0)
    assert failures.is_open
    failures.note(60.0)
    assert not failures.is_open


def test_an_engine_with_work_and_no_steps_is_given_up() -> None:
    """Not while it steps, is in a step (that has a watchdog of its own), or has nothing to do."""
    given_up: list[bool] = []
    watchdog = Watchdog(12.0, lambda: given_up.append(True))
    for now, steps, running in ((0.0, 1, 2), (11.0, 1, 2), (13.0, 2, 2), (24.0, 3, 0), (90.0, 3, 0)):
        watchdog.check(EngineStats(steps=steps, running=running), now)
    watchdog.check(EngineStats(steps=3, running=1), 100.0)
    watchdog.on_step(1000.0)
    watchdog.check(EngineStats(steps=3, running=1), 200.0)
    watchdog.on_step(None)
    watchdog.check(EngineStats(steps=3, running=1), 201.0)
    assert not given_up
    watchdog.check(EngineStats(steps=3, running=1), 214.0)
    assert given_up == [True]


_HANG = """
from streamserve.clients.process.supervision import Watchdog
watchdog = Watchdog(12.0)
watchdog.on_step(60.0)
watchdog.on_step(None)
watchdog.on_step({seconds})
def a_step_that_hangs():
    while True: pass
a_step_that_hangs()
"""


def test_a_step_that_hangs_ends_the_process_and_shows_where() -> None:
    """Though it never lets go of the GIL."""
    command = [sys.executable, "-c", _HANG.format(seconds=0.2)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "a_step_that_hangs" in result.stderr
