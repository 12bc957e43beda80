"""The official anthropic client's own fold. Standard input: streams, each its events and the whole message."""

import json
import sys

from anthropic.lib.streaming._messages import accumulate_event


def given(value):
    """Return JSON without fields that are null, which the client adds."""
    if isinstance(value, dict):
        return {name: given(one) for name, one in value.items() if one is not None}
    return [given(one) for one in value] if isinstance(value, list) else value


for events, whole in json.load(sys.stdin):
    message, buffers = None, {}
    for event in events:
        message = accumulate_event(event=event, current_snapshot=message, json_bufs=buffers)
    assert given(message.to_dict()) == given(whole), (message.to_dict(), whole)
print("folded")
