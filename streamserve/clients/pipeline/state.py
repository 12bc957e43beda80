"""`RunState`: the state of a run, a dict of JSON values that readers see as it changes.

    run.state["passages"] = 3                readers get {"snapshot": {"passages": 3}}
    run.state["cited"] = []                  {"delta": [{"op": "add", "path": "/cited", "value": []}]}
    run.state["cited"].append("help/7")      {"delta": [{"op": "add", "path": "/cited/-", "value": "help/7"}]}

Each change is one event `State`, at once: the first has the whole state, later events a patch, or again the whole state
where that is shorter than several operations. Values are copied on their way in; objects and lists within the state
are views of it (`StateDict`, `StateList`), so that a change in their depth is seen too. Bounded: `MAX_VALUE_CHARS` as
JSON.

A run that is tried again, as by another process, changes its state again from the start. `ShownStates` takes off what
readers were shown: so many changes as they have seen pass silently, and the next is told from what they have.
asyncio, or the thread of a synchronous step: one change at a time. Knows no journal.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence
from typing import Any, SupportsIndex

from streamserve.dialects.fold import state_after
from streamserve.protocol.events import State
from streamserve.protocol.json_patch import is_same, json_text, json_value, patch, patched

Show = Callable[[State, State], None]


class _Root:
    """The whole state, and what readers have of it.

    `show` is given each event, and the change as a patch: what a step keeps of it.
    """

    def __init__(self, value: Mapping[str, Any], show: Show) -> None:
        self.value: dict[str, Any] = json_value(value, "run.state")
        self._shown: Any = None  # what readers have; None before the first event
        self._show = show
        self._lock = threading.RLock()  # of a change: functions run side by side on threads

    def change(self, change: Callable[[], Any]) -> None:
        """Make a change of the value, and show it; a change that makes it too large is undone, and raises."""
        with self._lock:
            before = json.loads(json_text(self.value))
            try:
                change()
                after = json_value(self.value, "run.state")
            except BaseException:
                patched(self.value, patch(self.value, before))
                raise
            event = _event(self._shown, after)
            if event is not None:
                self._shown = after
                self._show(event, State(delta=json_text(patch(before, after))))


def _event(before: Any, after: Any) -> State | None:
    """Return what tells a reader that has `before` (None: nothing) of `after`; None if there is nothing to tell."""
    if before is not None and is_same(before, after):
        return None
    snapshot = json_text(after)
    if before is not None:
        operations = patch(before, after)
        delta = json_text(operations)
        if len(operations) == 1 or len(delta) < len(snapshot):
            return State(delta=delta)
    return State(snapshot=snapshot)


class _View:
    """A part of a state that has parts itself."""

    def __init__(self, root: _Root, value: Any) -> None:
        self._root, self._value = root, value

    def _seen(self, value: Any) -> Any:
        if isinstance(value, dict):
            return StateDict(self._root, value)
        return StateList(self._root, value) if isinstance(value, list) else value

    def copy(self) -> Any:
        """Return the value as a dict or a list of its own."""
        return json.loads(json_text(self._value))

    def __len__(self) -> int:
        return len(self._value)

    def __eq__(self, other: object) -> bool:
        return bool(self._value == (other._value if isinstance(other, _View) else other))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._value)


class StateDict(_View, MutableMapping[str, Any]):
    """An object of a state."""

    def __getitem__(self, name: str) -> Any:
        return self._seen(self._value[name])

    def __setitem__(self, name: str, value: Any) -> None:
        self.update({name: value})

    def __delitem__(self, name: str) -> None:
        self._root.change(lambda: self._value.__delitem__(name))

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._value))

    def update(self, *others: Any, **more: Any) -> None:
        """Set several values: one change, and one event."""
        new = json_value(dict(*others, **more), "run.state")
        self._root.change(lambda: self._value.update(new))

    def setdefault(self, name: str, default: Any = None) -> Any:
        """Return a value, which is set to `default` if it is not there: as a view, so that its changes are seen."""
        if name not in self._value:
            self[name] = default
        return self[name]

    def clear(self) -> None:
        """Remove every value."""
        self._root.change(self._value.clear)


class StateList(_View, MutableSequence[Any]):
    """A list of a state."""

    def __getitem__(self, index: Any) -> Any:
        found = self._value[index]
        return [self._seen(one) for one in found] if isinstance(index, slice) else self._seen(found)

    def __setitem__(self, index: Any, value: Any) -> None:
        new = json_value(list(value) if isinstance(index, slice) else value, "run.state")
        self._root.change(lambda: self._value.__setitem__(index, new))

    def __delitem__(self, index: Any) -> None:
        self._root.change(lambda: self._value.__delitem__(index))

    def insert(self, index: SupportsIndex, value: Any) -> None:
        """Insert a value before an index."""
        new = json_value(value, "run.state")
        self._root.change(lambda: self._value.insert(index, new))

    def extend(self, values: Any) -> None:
        """Add several values at the end: one change, and one event."""
        new = json_value(list(values), "run.state")
        self._root.change(lambda: self._value.extend(new))


class RunState(StateDict):
    """See above: a dict. `value` is what it begins with."""

    def __init__(self, value: Mapping[str, Any], show: Show) -> None:
        root = _Root(value, show)
        super().__init__(root, root.value)

    def repeat(self, kept: State) -> None:
        """Make a change that an earlier attempt has made within a step, which is not called again.

        Raises LookupError where the state is another than then.
        """
        self._root.change(lambda: state_after(self._value, kept))


class ShownStates:
    """The changes of a log, as far as the present attempt has not come to them yet."""

    def __init__(self) -> None:
        self._num_left = 0
        self._shown: Any = None  # what readers have; None before the first event
        self.own: Any = None  # the state of this attempt

    def add(self, event: State) -> None:
        """Add a change that the log has."""
        self._num_left += 1
        self._shown = state_after(self._shown, event)

    def rest_of(self, event: State) -> State | None:
        """Return what tells readers of a change of this attempt; None for a change that they have seen."""
        self.own = state_after(self.own, event)
        if self._num_left:
            self._num_left -= 1
            return None
        return self.rest()

    def rest(self) -> State | None:
        """Return what readers lack of the attempt's state, at its end too: it may have fewer changes than before."""
        if self.own is None:
            return None
        event = _event(self._shown, self.own)
        self._shown = json.loads(json_text(self.own))
        return event
