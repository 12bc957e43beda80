"""`manage.py streamserve_engine`: runs an engine by hand, and controls the running one."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.test.utils import override_settings

from tests.support.docs.demo_site import ROOT, environment, manage, processes_of

pytestmark = pytest.mark.timeout(300)

ECHO = {"PATH": "echo"}


@pytest.fixture
def by_hand(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """An engine started in a terminal, ready."""
    command = [sys.executable, "manage.py", "streamserve_engine"]
    engine = subprocess.Popen(command, cwd=ROOT, env=environment(tmp_path), stderr=subprocess.PIPE, text=True)
    assert engine.stderr is not None
    try:
        for line in engine.stderr:
            if "ready" in line:
                break
        yield engine
    finally:
        engine.kill()
        engine.communicate(timeout=30)


@pytest.mark.proof
def test_it_runs_until_ctrl_c(by_hand: subprocess.Popen[str], tmp_path: Path) -> None:
    """Ctrl-C ends the engine with 0, and none of its processes is left."""
    assert processes_of(tmp_path) == {by_hand.pid}
    status = manage(tmp_path, "streamserve_engine", "--status")
    assert (status.returncode, f"echo: ready, process {by_hand.pid};" in status.stdout) == (0, True), status
    by_hand.send_signal(signal.SIGINT)
    assert by_hand.wait(30) == 0
    gone = manage(tmp_path, "streamserve_engine", "echo", "--status")
    assert (gone.returncode, "No engine runs for the model 'echo'" in gone.stderr) == (1, True)


@pytest.mark.proof
def test_it_is_paused_resumed_and_drained_from_another_terminal(by_hand: subprocess.Popen[str], tmp_path: Path) -> None:
    """Each action prints the new state; while the engine is not ready, --status exits with 1."""
    for action, state in [("--pause", "paused"), ("--resume", "ready"), ("--drain", "draining")]:
        done = manage(tmp_path, "streamserve_engine", action)
        assert (done.returncode, re.findall(r"^echo: (\w+)", done.stdout)) == (0, [state]), done
    assert manage(tmp_path, "streamserve_engine", "--status").returncode == 1
    stopped = manage(tmp_path, "streamserve_engine", "--stop")
    assert f"process {by_hand.pid} has ended" in stopped.stdout
    assert by_hand.wait(30) == 0


@pytest.mark.proof
def test_it_sleeps_and_wakes_from_another_terminal(by_hand: subprocess.Popen[str], tmp_path: Path) -> None:
    """The process stays, and begins anew: asleep. --wake returns once the model is loaded."""
    asleep = manage(tmp_path, "streamserve_engine", "--sleep", "--when-idle")
    assert f"process {by_hand.pid} has gone to sleep" in asleep.stdout, asleep
    awake = manage(tmp_path, "streamserve_engine", "--wake")
    while "No engine runs" in awake.stderr:  # it is beginning
        awake = manage(tmp_path, "streamserve_engine", "--wake")
    assert f"echo: ready, process {by_hand.pid};" in awake.stdout, awake
    assert by_hand.poll() is None


def test_a_second_engine_is_not_needed(by_hand: subprocess.Popen[str], tmp_path: Path) -> None:
    """A second command reports the running engine and exits with 0."""
    second = manage(tmp_path, "streamserve_engine")
    assert (second.returncode, "already" in second.stderr) == (0, True), second
    assert by_hand.poll() is None


@pytest.mark.parametrize(
    ("settings", "args", "words"),
    [
        ({"MODELS": {"a": ECHO, "b": ECHO}}, [], "Name a model"),
        ({"MODELS": {"a": ECHO}}, ["b"], "no model 'b'"),
        ({"MODELS": {"a": ECHO}, "CLIENT": "thread"}, [], "inside the web process"),
        ({"TESTING": True}, [], "inside the web process"),
        ({"MODELS": {"a": ECHO}}, ["--pause"], "No engine runs"),
    ],
)
def test_refusals_name_the_way_out(settings: Any, args: list[str], words: str, tmp_path: Path) -> None:
    """A refusal is a sentence without a traceback."""
    raw = settings if "TESTING" in settings else {"STATE_DIR": tmp_path, **settings}
    with override_settings(STREAMSERVE=raw), pytest.raises(CommandError, match=words):
        call_command("streamserve_engine", *args)
