"""A whole answer as a UI message: the parts that its chunks make in a page, from what is stored of it. Pure.

    answer, its client's results, the answer after them …  ──►  one message: step-start, its parts, step-start, …

A page has one assistant's message for a whole round of tools: its id is the first answer's. Reasons, tokens and figures
are its metadata, under the package's own names where it has some.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from streamserve.dialects.fold import THINKING, TOOL_USE
from streamserve.protocol.events import TEXT, Done, Usage
from streamserve.protocol.json_body import loads_written
from streamserve.protocol.requests import Approved

# Blocks that only a pipeline's runs have: a call of its own function, and what that has returned.
SERVER_TOOL_USE, TOOL_RESULT = "server_tool_use", "tool_result"
CUT_OFF = "The call was cut off before its arguments were whole."
# A run gives its model the error of a call in these words, and any other result as it is.
_ERROR = "Error: "
# And what its user has refused in these, after which may be what the user has said.
_REFUSED = "The user has refused this call."
_UNNAMED = "tool"
_KINDS = {TEXT: "text", THINKING: "reasoning"}

Part = dict[str, Any]


def tool_name(name: str | None) -> str:
    """Return the name of a call's tool; a call has one."""
    return name or _UNNAMED


def called(text: str, *, is_whole: bool) -> dict[str, Any]:
    """Return the state and the input of a call. Arguments that were cut off, or are no JSON, are an error."""
    try:
        if is_whole:
            return {"state": "input-available", "input": loads_written(text) if text else {}}
    except ValueError:
        pass
    return {"state": "output-error", "input": text, "errorText": CUT_OFF}


def output_of(text: str) -> dict[str, Any]:
    """Return a function's result as `output`, objects and arrays as such, or its error as `errorText`."""
    if text.startswith(_ERROR):
        return {"errorText": text.removeprefix(_ERROR)}
    if text[:1] in ("{", "["):
        try:
            return {"output": loads_written(text)}
        except ValueError:
            pass
    return {"output": text}


def is_refusal(text: str) -> bool:
    """Return whether this is the result of a call that the user has refused."""
    return text.startswith(_REFUSED)


def custom_json(name: str, value: Any) -> Part:
    """Return an event of a pipeline's own as a data part."""
    return {"type": f"data-{name}", "data": value}


def state_json(state: Any) -> Part:
    """Return the state of a run as the one data part that has it."""
    return {"type": "data-state", "id": "state", "data": state}


def result_text(part: Mapping[str, Any]) -> str:
    """Return what a page's tool has returned, or its error, as the model gets it."""
    if part["state"] != "output-available":
        return f"{_ERROR}{part.get('errorText') or 'The tool failed.'}"
    output = part.get("output")
    return output if isinstance(output, str) else json.dumps(output, ensure_ascii=False)


def source_json(citation: Mapping[str, Any]) -> Part:
    """Return a citation, by its payload, as a source: of a document where it has no address."""
    place = {name: citation[name] for name in ("source", "id", "index", "start", "end") if name in citation}
    known = {
        "sourceId": f"{citation['source']}:{citation['id']}",
        "providerMetadata": {"streamserve": place},
    }
    title = citation.get("title")
    if citation.get("url") is not None:
        return {"type": "source-url", **known, "url": citation["url"], **({} if title is None else {"title": title})}
    title = f"{citation['source']}/{citation['id']}" if title is None else title
    return {"type": "source-document", **known, "mediaType": "text/plain", "title": title}


def usage_json(usage: Usage) -> dict[str, int]:
    """Return the counts under the package's names."""
    return {
        "inputTokens": usage.prompt_tokens,
        "cachedInputTokens": usage.cached_tokens,
        "outputTokens": usage.completion_tokens,
        "reasoningTokens": usage.reasoning_tokens,
        "totalTokens": usage.prompt_tokens + usage.completion_tokens,
    }


def metadata_json(usage: Usage, done: Done | None) -> dict[str, Any]:
    """Return what is known at the end: counts, seconds to the first token and in all, and tokens a second."""
    out: dict[str, Any] = {"usage": usage_json(usage)}
    if done is None:
        return out
    out |= {"finishReason": done.finish_reason, "latency": round(done.latency, 4)}
    if "ttft" in done.breakdown:
        out["ttft"] = round(done.breakdown["ttft"], 4)
    if done.breakdown.get("tpot"):
        out["tokensPerSecond"] = round(1 / done.breakdown["tpot"], 1)
    return out


def note_answers(parts: Iterable[Part], approvals: Iterable[Approved]) -> None:
    """Note in parts what the user has answered to calls that asked, where their results have not come yet."""
    given = {approved.id: approved.allow for approved in approvals}
    for part in parts:
        if part.get("state") == "approval-requested" and part["toolCallId"] in given:
            part["state"] = "approval-responded"
            part["approval"]["approved"] = given[part["toolCallId"]]


class UIMessage:
    """An assistant's message: its answers in order, and between them the results of its client's tools."""

    def __init__(self, message_id: str) -> None:
        self.id = message_id
        self.parts: list[Part] = []
        self.metadata: dict[str, Any] = {}
        self._calls: dict[str, Part] = {}
        self._sources: set[str] = set()

    def as_json(self) -> dict[str, Any]:
        """Return the message."""
        return {"id": self.id, "role": "assistant", "metadata": self.metadata, "parts": self.parts}

    def add_answer(
        self,
        blocks: Sequence[Mapping[str, Any]],
        *,
        citations: Iterable[Mapping[str, Any]] = (),
        approvals: Iterable[Mapping[str, Any]] = (),
        customs: Iterable[Mapping[str, Any]] = (),
        state: Any = None,
    ) -> None:
        """Add an answer: its blocks, citations, approvals, own events and state as docs/events.md has them.

        Data and sources without a place stand before the text, others after their block.
        """
        cited = list(citations)
        asked = {one["id"]: one for one in approvals}
        self.parts.append({"type": "step-start"})
        if state is not None:
            self._set_state(state)
        self.parts += [custom_json(one["name"], one["value"]) for one in customs]
        self._add_sources(one for one in cited if one.get("index") is None)
        has_result = False
        hidden: list[str] = []
        for block in blocks:
            if block["kind"] == TOOL_RESULT:
                has_result = True
                self.add_result(block.get("id") or "", block["text"])
            elif (part := self._part(block)) is not None:
                if has_result:
                    self.parts.append({"type": "step-start"})
                    has_result = False
                self.parts.append(part)
                if part.get("state") == "input-available" and part.get("providerExecuted"):
                    hidden.append(part["toolCallId"])
            self._add_sources(one for one in cited if one.get("index") == block["index"])
        self._add_sources(cited)
        for call_id in hidden:
            self._end_call(self._calls[call_id], asked.get(call_id), is_interrupted=bool(asked))

    def add_result(self, call_id: str, text: str) -> None:
        """Add the result of a call that the message has; a call that the user was asked about may be refused."""
        part = self._calls.get(call_id)
        if part is None:
            return
        if "approval" in part:
            part["approval"]["approved"] = not is_refusal(text)
            if is_refusal(text):
                part["state"] = "output-denied"
                return
        output = output_of(text)
        part["state"] = "output-error" if "errorText" in output else "output-available"
        part.update(output)

    def _set_state(self, state: Any) -> None:
        same = [part for part in self.parts if part["type"] == "data-state"]
        if same:
            same[0]["data"] = state
        else:
            self.parts.append(state_json(state))

    def _add_sources(self, citations: Iterable[Mapping[str, Any]]) -> None:
        for citation in citations:
            source = source_json(citation)
            if source["sourceId"] not in self._sources:
                self._sources.add(source["sourceId"])
                self.parts.append(source)

    def _part(self, block: Mapping[str, Any]) -> Part | None:
        """Return a block's part; None for an empty text, and for a kind that messages lack."""
        kind, text = block["kind"], block["text"]
        if kind in _KINDS:
            return {"type": _KINDS[kind], "text": text, "state": "done"} if text else None
        if kind not in (TOOL_USE, SERVER_TOOL_USE):
            return None
        call_id = block.get("id") or f"call_{block['index']}"
        part = {"type": f"tool-{tool_name(block.get('name'))}", "toolCallId": call_id}
        if kind == SERVER_TOOL_USE:
            part["providerExecuted"] = True
        self._calls[call_id] = part
        part.update(called(text, is_whole=not block.get("is_open")))
        return part

    @staticmethod
    def _end_call(part: Part, approval: Mapping[str, Any] | None, *, is_interrupted: bool) -> None:
        """End a call of the run's function that has no result here: its user is asked, or it is not shown."""
        if part["state"] != "input-available":
            return
        if approval is not None:
            asked = {"requestReason": approval["message"]} if approval.get("message") else {}
            part.update(state="approval-requested", approval={"id": part["toolCallId"], **asked})
        elif not is_interrupted:
            part.update(state="output-available", output=None)
