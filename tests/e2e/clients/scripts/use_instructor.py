"""instructor at our site: by a forced call, never `strict`, and by a schema. Arguments: URL, key, model."""

import sys
from typing import Literal

import instructor
import openai
from pydantic import BaseModel

URL, KEY, NAME = sys.argv[1:]
ASK = {"model": NAME, "temperature": 0, "max_tokens": 160, "max_retries": 0}
ASKED = [{"role": "user", "content": "As JSON: Rome, sunny."}]


class Report(BaseModel):
    """What the model is to fill in."""

    city: Literal["Oslo", "Rome", "Lima"]
    weather: Literal["rainy", "sunny", "foggy"]


with openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY) as plain:
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(plain, mode=mode)
        report, whole = client.chat.completions.create_with_completion(
            response_model=Report, messages=list(ASKED), **ASK
        )
        assert report.model_dump() == {"city": "Rome", "weather": "sunny"}, (mode, report)
        message = whole.choices[0].message
        assert message.reasoning_content, mode
        if mode is instructor.Mode.TOOLS:
            assert [call.function.name for call in message.tool_calls] == ["Report"], message
print("instructor: tools, JSON schema")
