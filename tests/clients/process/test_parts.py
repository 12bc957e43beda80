"""Laws of the parts of an engine process that need no engine: place, spec, failures, watchdog."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from streamserve.clients.process import server as host
from streamserve.clients.process.config import (
    EnginePathError,
    config_from_json,
    config_hash,
    config_to_json,
    dated,
    engine_paths,
    is_locked,
    listening,
    locked,
    open_log,
    prepare_folder,
)
from streamserve.clients.process.messages import TO_ENGINE, Hello, ReaderAt, Welcome, encode, is_replaced
from streamserve.clients.process.supervision import (
    BUSY_FACTOR,
    CircuitBreaker,
    LastFlight,
    ProcessActivity,
    StallClock,
    Watchdog,
    flight_record,
    last_flight,
)
from streamserve.engine.config import EngineConfig, LatencyClass, ModelConfig
from streamserve.engine.plan import Flight
from streamserve.protocol.engine import EngineStats
from tests.support.engines.engine_processes import spec_in
from tests.support.processes import state_of


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


def test_a_position_without_its_last_field_is_read() -> None:
    """A worker of another version may not say whether its reader looks away, or say more than this engine knows."""
    message = ReaderAt(3, (7, 9), is_away=True)
    *fields, _ = msgspec.msgpack.decode(encode(message))
    assert TO_ENGINE.decode(encode(message)) == message
    assert TO_ENGINE.decode(msgspec.msgpack.encode(fields)) == ReaderAt(3, (7, 9), is_away=False)
    assert TO_ENGINE.decode(msgspec.msgpack.encode([*fields, True, "new"])) == message


def test_the_paths_depend_on_site_and_alias_alone(folder: Path) -> None:
    """Workers with different settings share an engine; different models and sites do not."""
    spec = spec_in(folder)
    assert engine_paths(spec) == engine_paths(replace(spec, engine=EngineConfig(), made_at=1.0))
    other = replace(spec, model=ModelConfig(alias="a/../b", path="echo"))
    assert engine_paths(spec).socket != engine_paths(other).socket != engine_paths(replace(other, site="x")).socket
    assert engine_paths(other).log.parent == folder


def test_without_a_folder_it_is_ours_among_the_temporary_ones(folder: Path) -> None:
    """The default folder is one per user."""
    expected = Path(tempfile.gettempdir()) / f"streamserve-{os.geteuid()}"
    assert engine_paths(spec_in(folder, runtime_dir="")).socket.parent == expected


def test_a_folder_that_other_users_can_write_is_refused(folder: Path) -> None:
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
    """One that is short is appended to."""
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
    """Half open: a single failure of the next try opens it again."""
    failures = CircuitBreaker(3, 10.0)
    failures.trip(0.0)
    failures.note(11.0)
    assert failures.is_open
    failures.note(60.0)
    assert not failures.is_open


TICK = 0.25


@pytest.fixture(autouse=True)
def no_timer() -> Iterator[None]:
    """A watchdog's timer does not outlive its test."""
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)


def in_step(seconds_allowed: float | None) -> Flight:
    return Flight(seconds_allowed=seconds_allowed, stream_ids=frozenset())


class Looking:
    """A watchdog, checked every tick of a clock that only the test moves."""

    def __init__(self, seconds: float = 12.0) -> None:
        self.num_given_up = 0
        self.watchdog = Watchdog(seconds, TICK, self._give_up)
        self.now = 0.0

    def _give_up(self) -> None:
        self.num_given_up += 1

    def look(self, seconds: float, *, steps: int = 3, running: int = 1, busy: float = 0.0) -> int:
        """Check for so many seconds, in which the process is busy for that share of the time."""
        for _ in range(round(seconds / TICK)):
            self.now += TICK
            self.watchdog.check(EngineStats(steps=steps, running=running), self.now, busy * TICK)
        return self.num_given_up


def test_an_engine_with_work_and_no_steps_is_given_up() -> None:
    """Not while it steps, nor when it has no work."""
    looking = Looking()
    for steps, running in ((1, 2), (2, 2), (3, 0), (3, 0)):
        assert looking.look(11.0, steps=steps, running=running) == 0
    assert looking.look(11.0) == 0
    assert looking.look(2.0) > 0


def test_an_engine_whose_answers_all_wait_for_their_readers_lives() -> None:
    """It computes no step, but looks around now and then. Without looks it is given up."""
    looking = Looking()
    for _ in range(60):
        looking.watchdog.on_step(in_step(None))
        assert looking.look(1.0) == 0
    assert looking.look(13.0) > 0


def test_a_step_is_given_up_after_the_time_it_may_take() -> None:
    """Each call of the runner has a limit of its own, longer or shorter than the limit between steps."""
    looking = Looking()
    for seconds_allowed in (50.0, 2.0):
        for _ in range(2):
            looking.watchdog.on_step(in_step(seconds_allowed))
            assert looking.look(seconds_allowed) == 0
    assert looking.look(1.0) > 0
    looking.watchdog.on_step(in_step(None))


def test_time_in_which_no_process_runs_does_not_count() -> None:
    """On a stopped machine or a paused VM the checks stop as well, for an hour. A later hang is noticed as before."""
    looking = Looking()
    looking.watchdog.on_step(in_step(2.0))
    for _ in range(3):
        assert looking.look(TICK) == 0
        looking.now += 3600.0
    assert looking.look(2.5) > 0
    looking.watchdog.on_step(in_step(None))


def test_a_step_that_computes_may_take_longer() -> None:
    """`BUSY_FACTOR` times as long: a weak CPU. A step that only waits may not."""
    looking = Looking()
    looking.watchdog.on_step(in_step(2.0))
    assert looking.look(2.0 * (BUSY_FACTOR - 1), busy=1.0) == 0
    assert looking.look(2.0 * 2, busy=1.0) > 0
    looking.watchdog.on_step(in_step(None))


_HANG = """
from streamserve.engine.plan import Flight
from streamserve.clients.process.supervision import Watchdog
watchdog = Watchdog(12.0, 0.2)
for seconds in (60.0, None, {seconds}):
    watchdog.on_step(Flight(seconds_allowed=seconds, stream_ids=frozenset()))
def a_step_that_hangs():
    while True: pass
a_step_that_hangs()
"""


def test_a_step_that_hangs_ends_the_process_and_shows_where() -> None:
    """Even if it never releases the GIL."""
    command = [sys.executable, "-c", _HANG.format(seconds=0.05)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == -signal.SIGPROF
    assert "a_step_that_hangs" in result.stderr


_STATES = {
    "sleeping": "input()",
    "computing": "while True: pass",
    "stopped": "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("state", _STATES)
def test_the_activity_of_a_process(state: str) -> None:
    """A process that sleeps or is stopped is not busy; one that computes, or waits for a core, is."""
    program = f"print(flush=True); {_STATES[state]}" if state != "computing" else f"print(flush=True)\n{_STATES[state]}"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            wanted = {"sleeping": "S", "computing": "R", "stopped": "T"}[state]
            while state_of(process.pid) != wanted:
                pass
            activity = ProcessActivity(process.pid)
            assert activity.is_known
            assert activity.busy_seconds(10.0) == (10.0 if state == "computing" else 0.0)
        finally:
            process.kill()
    assert activity.busy_seconds(10.0) == 0.0


def test_a_peer_is_silent_by_the_looks_at_it() -> None:
    """One long gap between two checks counts as a short one, and data resets the count."""
    stall = StallClock(1.0)
    assert [stall.look(now) for now in (0.0, 0.5, 1.5, 500.0)] == [0.0, 0.5, 1.5, 2.5]
    stall.seconds = 0.0
    assert stall.look(500.5) == 0.5
    assert stall.look(501.5, busy_seconds=1.0) == pytest.approx(0.5 + 1 / BUSY_FACTOR)


def test_the_record_has_its_room_before_the_first_step(folder: Path) -> None:
    """A disk that is full later ends no engine; one that is full now is named, with the way out."""
    path = folder / "x.flight"
    with flight_record(path):
        assert path.stat().st_blocks * 512 >= path.stat().st_size > 0
    code = f"""
import resource, signal
from pathlib import Path
from streamserve.clients.process.supervision import flight_record
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
with flight_record(Path({str(path)!r})):
    pass
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "EnginePathError" in done.stderr
    assert f"{path} cannot be written to" in done.stderr


def test_the_record_names_what_was_in_flight(folder: Path) -> None:
    """Of that engine process only; a step whose ids do not fit is not recorded."""
    path = folder / "x.flight"
    with flight_record(path) as record:
        assert last_flight(path, os.getpid()) == LastFlight()
        flight = Flight(seconds_allowed=1.0, stream_ids=frozenset({"a", "b"}), is_trial=True)
        record.write(flight)
        assert last_flight(path, os.getpid()) == LastFlight(stream_ids=frozenset({"a", "b"}), is_trial=True)
        assert last_flight(path, os.getpid() + 1) == LastFlight()
        record.write(replace(flight, stream_ids=frozenset()))
        assert last_flight(path, os.getpid()) == LastFlight()
        record.write(replace(flight, stream_ids=frozenset(f"{number:099}" for number in range(5000))))
        assert last_flight(path, os.getpid()) == LastFlight()
    assert last_flight(folder / "none", os.getpid()) == LastFlight()
