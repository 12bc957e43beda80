"""`manage.py streamserve_batch`: from a file to a file, and on from where it was."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from streamserve.management.commands.streamserve_batch import Progress
from tests.support.sites.batch_runs import jsonl, line

pytestmark = pytest.mark.django_db(transaction=True)
HI = [{"role": "user", "content": "x"}]


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())


def run(folder: Path, lines: list[Any] | None = None, **options: Any) -> tuple[str, list[str]]:
    """Run the command; return the error that it ended in, and the names in its output."""
    if lines is not None:
        (folder / "in.jsonl").write_bytes(jsonl(lines))
    message, shown = "", io.StringIO()
    try:
        call_command("streamserve_batch", str(folder / "in.jsonl"), str(folder / "out.jsonl"), stderr=shown, **options)
    except CommandError as error:
        message = f"{error} {shown.getvalue()}"
    output = folder / "out.jsonl"
    return message, [one["custom_id"] for one in results(output)]


def results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(one) for one in path.read_bytes().splitlines()] if path.exists() else []


def test_rows_are_answered(tmp_path: Path) -> None:
    """Each once, in the format of the API; without errors there is no file of errors."""
    names = [f"row {index}" for index in range(12)]
    assert run(tmp_path, [line(name) for name in names], concurrency=4)[0] == ""
    found = results(tmp_path / "out.jsonl")
    assert sorted(one["custom_id"] for one in found) == sorted(names)
    assert {one["response"]["status_code"] for one in found} == {200}
    assert found[0]["response"]["body"]["object"] == "chat.completion"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_rows_that_failed_end_it_with_an_error(tmp_path: Path) -> None:
    """They are in the file of errors, and are asked again; when they are right, that file goes."""
    message, names = run(tmp_path, [line("good"), line("bad", messages=HI, temperature=9)])
    assert "1 row failed" in message
    assert names == ["good"]
    (bad,) = results(tmp_path / "out.errors.jsonl")
    assert (bad["custom_id"], bad["response"]["status_code"]) == ("bad", 400)
    message, names = run(tmp_path, [line("good"), line("bad")])
    assert (message, names) == ("", ["good", "bad"])
    assert not (tmp_path / "out.errors.jsonl").exists()


def test_what_is_there_is_not_run_again(tmp_path: Path) -> None:
    """A line that a kill has torn is cut off, and its row is run again."""
    run(tmp_path, [line("a"), line("b")], concurrency=1)
    output = tmp_path / "out.jsonl"
    first, second = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(first + second[:-20])
    assert run(tmp_path, [line("a"), line("b"), line("c")], concurrency=1) == ("", ["a", "b", "c"])
    assert output.read_bytes().startswith(first)
    assert run(tmp_path, restart=True, concurrency=1) == ("", ["a", "b", "c"])
    assert not output.read_bytes().startswith(first)  # its request_id is another


@pytest.mark.parametrize("content", ['{"mine": 1}\n', '{"mine": 1}', "mine"])
def test_another_file_is_not_written_over(content: str, tmp_path: Path) -> None:
    """Neither one that has no results, be its last line torn or not, nor the input."""
    (tmp_path / "out.jsonl").write_text(content)
    (tmp_path / "in.jsonl").write_bytes(jsonl([line("a")]))
    with pytest.raises(CommandError, match="no output of this command"):
        call_command("streamserve_batch", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"))
    assert (tmp_path / "out.jsonl").read_text() == content
    with pytest.raises(CommandError, match="three files"):
        call_command("streamserve_batch", str(tmp_path / "in.jsonl"), str(tmp_path / "in.jsonl"))


def test_a_wrong_file_is_refused_before_any_row(tmp_path: Path) -> None:
    """With the lines that are wrong."""
    message, names = run(tmp_path, [line("a"), line("b"), line("a")])
    assert names == []
    assert "no row was run" in message
    assert "line 3" in message
    assert "duplicate_custom_id" in message
    message, _ = run(tmp_path, [line("a", "/v1/images/generations", input="x")])
    assert "takes no batches" in message
    with pytest.raises(CommandError, match="no file"):
        call_command("streamserve_batch", str(tmp_path / "none.jsonl"), str(tmp_path / "out.jsonl"))
    with pytest.raises(CommandError, match="1 to 1024"):
        call_command("streamserve_batch", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), concurrency=0)


@pytest.mark.parametrize("output", ["no/such/folder/out.jsonl", "."])
def test_an_output_that_cannot_be_written_is_one_sentence(tmp_path: Path, output: str) -> None:
    """It names the path, and no row is run."""
    (tmp_path / "in.jsonl").write_bytes(jsonl([line("a")]))
    with pytest.raises(CommandError) as caught:
        call_command(
            "streamserve_batch", str(tmp_path / "in.jsonl"), str(tmp_path / output), errors=tmp_path / "errors"
        )
    assert str(caught.value).startswith(str(tmp_path / output))
    assert not (tmp_path / "errors").exists()


def test_it_writes_to_the_terminal_what_it_does() -> None:
    """Share, rows, pace, what is left, failures, and why it waits."""
    progress = Progress(num_rows=5000, num_before=100, num_done=300, num_failed=2, began_at=0.0)
    assert progress.line(10.0) == "  8%  402/5,000  30.2/s  152 s left  2 failed"
    progress.waiting = "the engine is loading"
    assert progress.line(10.0).endswith("waiting: the engine is loading")


def test_help_names_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    """--help."""
    with pytest.raises(SystemExit):
        call_command("streamserve_batch", "--help")
    shown = capsys.readouterr().out
    for option in ("--errors", "--concurrency", "--endpoint", "--tenant", "--restart"):
        assert option in shown
