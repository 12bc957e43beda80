"""`EngineThread`: the thread that loads a model and then does nothing but step its core.

It never waits for a client: updates are passed on in one call per step. It sleeps only when there is nothing to do. If
anything in load or step raises, the engine is dead, and the listener is notified once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Protocol

from streamserve.clients.thread.acceptance import LoadedEngine
from streamserve.clients.thread.loading import Loading
from streamserve.engine.config import EngineConfig
from streamserve.engine.core import EngineCore
from streamserve.engine.output import SequenceUpdate
from streamserve.engine.plan import OnStep, Progress, StepPlan
from streamserve.protocol.errors import StreamserveError

logger = logging.getLogger(__name__)

Load = Callable[[Progress], LoadedEngine]

# While all sequences wait for their readers, or for time to pass, a step is made so often.
_REST_SECONDS = 0.25
_SHUT_DOWN = "the engine was shut down."


class Listener(Protocol):
    """Receives the output of the thread. Called on the engine thread; must return at once."""

    def on_updates(self, updates: tuple[SequenceUpdate, ...]) -> None:
        """Take the updates of one step."""

    def on_end(self, code: str) -> None:
        """The engine has ended: "engine_died" or "engine_closed"."""


class _Closed(Exception):
    """Ends a load whose client was closed meanwhile."""


class EngineThread:
    """Owns the thread, the core and how far its `loading` is. All but `_run` and below may be called from any thread.

    `listener` is set before `start`. `on_plan` and `on_step` are the core's. An engine that `loads_at_once` is loaded
    when `start` returns.
    """

    def __init__(
        self,
        alias: str,
        load: Load,
        config: EngineConfig,
        clock: Callable[[], float],
        on_plan: Callable[[StepPlan], None] | None = None,
        on_step: OnStep | None = None,
        *,
        loads_at_once: bool = False,
    ) -> None:
        self.listener: Listener | None = None
        self.engine: LoadedEngine | None = None
        self.core: EngineCore | None = None
        self.end_code: str | None = None  # set before `on_end` is called
        self.loading = Loading(alias, clock)
        self._load = load
        self._config = config
        self._clock = clock
        self._on_plan = on_plan
        self._on_step = on_step
        self._loads_at_once = loads_at_once
        self._thread = threading.Thread(target=self._run, name=f"engine-{alias}", daemon=True)
        # Guards _is_closing, _settling and the first start; waited on when there is nothing to do.
        self._news = threading.Condition()
        self._settling: list[Future[None]] = []
        self._is_closing = False

    def start(self) -> None:
        """Begin loading, once."""
        if not self.loading.is_idle:
            return
        with self._news:
            if not self.loading.is_idle or self._is_closing:
                return
            self.loading.begin()
        self._thread.start()
        if self._loads_at_once:
            self.loading.wait()

    def wake(self) -> None:
        """Wake the thread: the core has work."""
        with self._news:
            self._news.notify()

    def after_step(self) -> Future[None]:
        """Return a future that is done when a step that begins after this call is over, or the engine is."""
        future: Future[None] = Future()
        with self._news:
            if self.end_code is None:
                self._settling.append(future)
                self._news.notify()
                return future
        future.set_result(None)
        return future

    def close(self) -> None:
        """Ask the thread to end after the step it is in."""
        with self._news:
            self._is_closing = True
            self._news.notify()
            if self.loading.is_idle:
                self.loading.fail(_SHUT_DOWN)

    def join(self) -> None:
        """Wait until the thread has ended. Blocks."""
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._load_engine()
            self._serve()
            self._end("engine_closed", _SHUT_DOWN)
        except _Closed:
            self._end("engine_closed", _SHUT_DOWN)
        except StreamserveError as error:  # its message is written for operators: no traceback needed
            logger.error("model %s could not be loaded: %s", self.loading.description.alias, error.message)
            self._end("engine_died", error.message)
        except Exception as error:  # the edge of the thread: the engine is dead
            logger.exception("engine %s died", self.loading.description.alias)
            self._end("engine_died", _describe_failure(error))
        finally:
            if self.engine is not None:
                self.engine.runner.close()

    def _end(self, code: str, message: str) -> None:
        self.loading.fail(message)
        with self._news:
            self.end_code = code
            settling, self._settling = self._settling, []
        _settle(settling)
        if self.listener is not None:
            self.listener.on_end(code)

    def _load_engine(self) -> None:
        engine = self._load(self._report)
        config = replace(self._config, max_model_len=engine.facts.max_model_len)
        self.core = EngineCore(
            engine.runner,
            config,
            self._clock,
            on_plan=self._on_plan,
            on_step=self._on_step,
            revision=engine.facts.revision,
            draft=engine.draft,
        )
        self.engine = engine
        self.loading.succeed(engine)

    def _serve(self) -> None:
        assert self.core is not None
        core = self.core
        while True:
            with self._news:
                self._news.wait_for(
                    lambda: core.has_work or self._settling or self._is_closing,
                    timeout=_REST_SECONDS if core.is_resting else None,
                )
                if self._is_closing:
                    return
                settling, self._settling = self._settling, []
            updates = core.step()
            if updates and self.listener is not None:
                self.listener.on_updates(updates)
            if settling:
                _settle(settling)

    def _report(self, stage: str, fraction: float, loaded_bytes: int = 0, total_bytes: int = 0) -> None:
        if self._is_closing:
            raise _Closed
        self.loading.report(stage, fraction, loaded_bytes, total_bytes)


def _describe_failure(error: Exception) -> str:
    """Name the kind of failure; its message stays in the log."""
    return f"the engine failed ({type(error).__name__}); the log has the details."


def _settle(futures: list[Future[None]]) -> None:
    for future in futures:
        if future.set_running_or_notify_cancel():
            future.set_result(None)
