"""Lines of the files of both batch APIs: each is one line for every reader, whatever the model wrote."""

from __future__ import annotations

import io
import json
from types import ModuleType

import httpx
import pytest

from streamserve.dialects.anthropic import batches as anthropic
from streamserve.dialects.batches import RowResult, Unrun
from streamserve.dialects.openai import batches as openai
from streamserve.protocol.limits import Limits

# Every character that some reader takes for the end of a line, and half of a surrogate pair.
TEXT = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\x1dh\x1ei\r\nj\nk\ud83d"
ROW = RowResult(
    line=1, custom_id=TEXT, request_id="req_1", status_code=200, body=json.dumps({"text": TEXT}, ensure_ascii=True)
)
SHOWN_ROW = RowResult(
    line=1,
    custom_id="é",
    request_id="req_1",
    status_code=400,
    body=json.dumps({"text": TEXT.rstrip("\ud83d")}, ensure_ascii=False),
)
WHY = Unrun(status="failed", code="c", message=TEXT)


@pytest.mark.parametrize("api", [openai, anthropic])
@pytest.mark.parametrize("row", [ROW, SHOWN_ROW, None])
def test_a_row_is_one_line(api: ModuleType, row: RowResult | None) -> None:
    """Python's splitlines and httpx's iter_lines find one line, and it has the text."""
    content = 2 * (api.result_line(row) if row is not None else api.unrun_line("req_1", TEXT, WHY))
    lines = content.decode().splitlines()
    assert lines == [*httpx.Response(200, content=content).iter_lines()]
    assert len(lines) == 2
    assert TEXT[:-1] in "".join(_texts(json.loads(lines[0])))


def _texts(value: object) -> list[str]:
    """Return all the strings in a value."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [value] if isinstance(value, str) else [text for one in inner for text in _texts(one)]


def test_the_input_that_is_made_of_a_body_has_a_line_for_each_request() -> None:
    """The requests of POST /v1/messages/batches, and how long their lines may be."""
    text = TEXT[:-1]
    requests = [{"custom_id": one, "params": {"model": "m", "system": text}} for one in "ab"]
    body, out = json.dumps({"requests": requests}, ensure_ascii=False).encode(), io.BytesIO()
    assert anthropic.write_requests(io.BytesIO(body), False, out, Limits()) == 2
    lines = out.getvalue().decode().splitlines()
    assert [json.loads(line)["body"]["system"] for line in lines] == [text, text]
