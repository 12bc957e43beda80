"""A compiled LangGraph graph as a pipeline: what `astream` gives becomes the blocks of its run. asyncio.

    tasks       a node begins: a step. Nodes that run side by side are shown one after the other, in the graph's order
    messages    text, thoughts and calls of a model, as they come; the results of tools
    values      the last state, shown where no text was

Nodes are kept: in another attempt of the run the graph runs from its start, and a node that has finished gives what it
gave (`_KeptNode`), with what it has shown. A node of a subgraph is kept by itself. LangGraph serializes what nodes
give; what it cannot is not kept. The graph's own checkpointer is not used: the conversation comes with the request.
Written for langgraph 1.2.
"""

from __future__ import annotations

import base64
import json
from collections import deque
from contextlib import aclosing
from typing import Any

from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, ToolMessage
from langchain_core.runnables import Runnable
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.pregel import Pregel
from langgraph.types import Command
from pydantic_core import to_jsonable_python

from streamserve.clients.agents.conversation import calls_of, turns
from streamserve.clients.pipeline.journal import Place
from streamserve.clients.pipeline.run import Run
from streamserve.clients.pipeline.tools import ToolCall, result_text
from streamserve.clients.pipeline.voice import json_text
from streamserve.protocol.events import Usage
from streamserve.protocol.requests import Message

_MODES = ["tasks", "messages", "values"]
_MAX_KEPT_BYTES = 700_000  # of what a node gives, so that it is less than 1 MiB as text
_UNNAMED = "LangGraph"  # of a graph without a name
_GROWING = ("text", "thought", "arguments")
Shown = list[Any]  # ["text", "..."]: what is called on the voice, with its arguments


def name_of(graph: Any) -> str:
    """Return the graph's name; "" if it has none."""
    name = str(graph.name or "")
    return "" if name == _UNNAMED else name


def description_of(graph: Any) -> str:
    """Return nothing: a graph has no description."""
    return ""


async def respond(graph: Any, run: Run) -> None:
    """Run the graph on the run's conversation, and show what it does. Its nodes find the run by `current_run()`."""
    config = {"configurable": {"thread_id": run.stream_id}}
    kept, show = _kept(graph, run), _Show(run)
    given: Any = _input(graph, run)
    while given is not None:
        async with aclosing(kept.astream(given, config, stream_mode=_MODES, subgraphs=True)) as stream:
            async for namespace, mode, payload in stream:
                if mode == "messages":
                    await show.message(*payload)
                elif not namespace:
                    await (show.task(payload) if mode == "tasks" else show.values(payload))
        given = await show.decided()
    await show.finish()


class _Task:
    """A node that runs, or waits to be shown. `place` keeps what it has shown."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.shown: list[Shown] = []
        self.num_shown = 0
        self.is_over = False


class _Show:
    """Puts what a graph gives into its run."""

    def __init__(self, run: Run) -> None:
        self._run, self._voice = run, run.voice()
        self._tasks: dict[str, _Task] = {}
        self._order: deque[str] = deque()  # the tasks that are not shown whole; the first is shown as it runs
        self._state: Any = None
        self._usage = Usage()
        self._waiting: list[tuple[str, str, Any]] = []  # for the user's answers: LangGraph's ids, nodes, values
        self._num_asked = 0

    async def decided(self) -> Any:
        """Return how the graph goes on with its user's answers to `interrupt`; None if it is over.

        Each is shown as a call of its node. Without the answers they are asked for, which ends the run.
        """
        waiting, self._waiting = self._waiting, []
        calls = []
        for _, node, value in waiting:
            self._num_asked += 1
            calls.append(ToolCall(id=f"interrupt-{self._num_asked}", name=node, arguments=json_text(value)))
            await self._voice.call(calls[-1].id, node, calls[-1].arguments)
            await self._voice.end()
        answers = [self._run.answer_to(call.id) for call in calls]
        if None in answers:
            questions = [value if isinstance(value, str) else None for _, _, value in waiting]
            await self._run.ask(list(zip(calls, questions, strict=True)))
        resume = {}
        for (id, _, _), call, answer in zip(waiting, calls, answers, strict=True):
            assert answer is not None
            resume[id] = {"allow": answer.allow, "message": answer.message}
            await self._voice.result(call.id, json_text(resume[id]))
        return Command(resume=resume) if resume else None

    async def task(self, payload: Any) -> None:
        """Begin or end a task of the graph itself."""
        id = payload["id"]
        if "result" not in payload:
            task = self._tasks[id] = _Task(self._run.place("task"))
            task.shown = [["announce", payload["name"]], *(task.place.found or ())]
            self._order.append(id)
        elif id in self._tasks:
            if payload.get("interrupts"):
                self._waiting += [(one["id"], payload["name"], one["value"]) for one in payload["interrupts"]]
            task = self._tasks[id]
            task.is_over = True
            if task.place.found is None and not payload.get("error") and not payload.get("interrupts"):
                await task.place.keep(_joined(task.shown[1:]))
        await self._catch_up()

    async def message(self, message: AnyMessage, metadata: Any) -> None:
        """Take a message, or a piece of a message, of a task or of what runs within it."""
        node = str(metadata.get("langgraph_checkpoint_ns") or "").partition("|")[0]
        task = self._tasks.get(node.rpartition(":")[2])
        if task is None or task.place.found is not None:
            return  # another attempt has shown the task, and that is shown again
        for one in _shown_of(message):
            self._add(task, one)
        await self._catch_up()

    @staticmethod
    def _add(task: _Task, one: Shown) -> None:
        """Add what a task shows; neighbouring text is one, as far as it waits."""
        waits = task.num_shown < len(task.shown)
        if waits and one[0] in _GROWING and task.shown[-1][0] == one[0]:
            task.shown[-1][1] += one[1]
        else:
            task.shown.append(one)

    async def values(self, state: Any) -> None:
        """Note the state."""
        self._state = state

    async def finish(self) -> None:
        """Show the last state, if no text was shown, and count."""
        if not self._voice.has_text and self._state is not None:
            await self._voice.text(_last_text(self._state))
        await self._voice.end()
        self._voice.count(self._usage)

    async def _catch_up(self) -> None:
        """Show what may be shown by now."""
        while self._order:
            task = self._tasks[self._order[0]]
            while task.num_shown < len(task.shown):
                task.num_shown += 1
                await self._put(*task.shown[task.num_shown - 1])
            if not task.is_over:
                return
            await self._voice.end()
            del self._tasks[self._order.popleft()]

    async def _put(self, what: str, *arguments: Any) -> None:
        if what == "announce":
            await self._run.announce(*arguments)
        elif what == "cite":
            url, title = arguments
            self._run.cite("web", id=url, title=title, url=url)
        elif what == "count":
            self._usage = Usage(
                prompt_tokens=self._usage.prompt_tokens + arguments[0],
                completion_tokens=self._usage.completion_tokens + arguments[1],
                cached_tokens=self._usage.cached_tokens + arguments[2],
                reasoning_tokens=self._usage.reasoning_tokens + arguments[3],
            )
        else:
            await getattr(self._voice, what)(*arguments)


def _shown_of(message: AnyMessage) -> list[Shown]:
    """Return what is shown of a message, or of a piece."""
    if isinstance(message, ToolMessage):
        return [["result", message.tool_call_id, result_text(message.text or to_jsonable_python(message.content))]]
    if not isinstance(message, AIMessage):
        return []
    out: list[Shown] = []
    for block in message.content_blocks:
        one: Any = block
        if one["type"] == "text":
            out.append(["text", one["text"]])
            cited = [each for each in one.get("annotations") or () if each.get("url")]
            out += [["cite", each["url"], each.get("title")] for each in cited]
        elif one["type"] == "reasoning":
            out.append(["thought", one.get("reasoning") or ""])
        elif one["type"] == "tool_call":
            out.append(["call", one["id"] or "", one["name"], json_text(one["args"])])
        elif one["type"] == "tool_call_chunk" and one.get("name"):
            out.append(["call", one.get("id") or "", one["name"], one.get("args") or ""])
        elif one["type"] == "tool_call_chunk":
            out.append(["arguments", one.get("args") or ""])
    if used := message.usage_metadata:
        details: Any = used.get("input_token_details") or {}
        made: Any = used.get("output_token_details") or {}
        counts = (used["input_tokens"], used["output_tokens"], details.get("cache_read"), made.get("reasoning"))
        out.append(["count", *(count or 0 for count in counts)])
    return [one for one in out if one[0] not in _GROWING or one[1]]


def _joined(shown: list[Shown]) -> list[Shown]:
    """Return what was shown with neighbouring text as one."""
    out: list[Shown] = []
    for one in shown:
        if out and one[0] in _GROWING and out[-1][0] == one[0]:
            out[-1] = [one[0], out[-1][1] + one[1]]
        else:
            out.append(one)
    return out


def _last_text(state: Any) -> str:
    """Return the text of the last message in a state, or the state as JSON."""
    messages = state.get("messages") if isinstance(state, dict) else None
    if messages and isinstance(messages[-1], AIMessage):
        return str(messages[-1].text)
    return result_text(to_jsonable_python(state, fallback=str))


# What is kept of nodes


def _kept(graph: Any, run: Run) -> Any:
    """Return a copy of a graph whose nodes, and those of graphs within it, are kept."""
    nodes = {name: node.copy({"bound": _bound(node.bound, name, run)}) for name, node in graph.nodes.items()}
    update = {"nodes": nodes, "checkpointer": InMemorySaver() if graph.checkpointer not in (None, False) else None}
    return graph.copy(update)


def _bound(bound: Any, name: str, run: Run) -> Any:
    """Return what a node calls, kept; the node that takes the graph's input calls nothing."""
    if name.startswith("__"):
        return bound
    return _KeptNode(_kept(bound, run) if isinstance(bound, Pregel) else bound, name, run)


class _KeptNode(Runnable[Any, Any]):
    """What a node calls: once for each of its places in the graph's steps."""

    def __init__(self, bound: Any, name: str, run: Run) -> None:
        self._bound, self._node, self._run = bound, name, run
        self._serializer = JsonPlusSerializer()

    def invoke(self, input: Any, config: Any = None, **kwargs: Any) -> Any:
        """Refuse: a run is async."""
        raise NotImplementedError("a graph runs async here")

    async def ainvoke(self, input: Any, config: Any = None, **kwargs: Any) -> Any:
        """Call the node, or return what it has given in another attempt."""
        metadata = (config or {}).get("metadata") or {}
        place = json.dumps([metadata.get("langgraph_step"), metadata.get("langgraph_path")], default=str)
        given: list[Any] = []

        async def result() -> Any:
            given.append(await self._bound.ainvoke(input, config, **kwargs))
            try:
                kind, data = self._serializer.dumps_typed(given[0])
            except (TypeError, ValueError):
                return object()  # which is not kept
            if len(data) > _MAX_KEPT_BYTES:
                return object()
            return [kind, base64.b64encode(data).decode()]

        kept = await self._run.keep(f"node {self._node} {place}", result)
        if given:
            return given[0]
        return self._serializer.loads_typed((kept[0], base64.b64decode(kept[1])))


# What a graph is given


def _input(graph: Any, run: Run) -> dict[str, Any]:
    """Return the state that a graph begins with: the caller's `input`, and the conversation as `messages`."""
    state = dict(run.input)
    if "messages" in graph.channels:
        state["messages"] = [_message(turn, f"{run.stream_id}-{place}") for place, turn in enumerate(turns(run))]
    elif not state and "question" in graph.channels:
        state["question"] = run.question
    return state


def _message(turn: Message, id: str) -> AnyMessage:
    if turn.role == "assistant":
        calls = [{"id": id, "name": name, "args": json.loads(text or "{}")} for id, name, text in calls_of(turn)]
        return AIMessage(turn.content, tool_calls=calls, id=id)
    if turn.role == "tool":
        return ToolMessage(turn.content, tool_call_id=str(turn.extra.get("tool_call_id") or ""), id=id)
    return HumanMessage(turn.content, id=id)
