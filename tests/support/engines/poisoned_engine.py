"""An engine process whose echo runner ends, or raises, at a step that holds a poisonous token.

`planted(monkeypatch)` makes workers start this program instead of the plain one, for every engine and its successors.
"""

from __future__ import annotations

import os
import sys

import pytest

from streamserve.clients import factory
from streamserve.clients.process import link, server
from streamserve.engine.echo import EchoRunner
from streamserve.engine.plan import StepPlan

# Bytes that stand for themselves in a prompt of the echo engine. One ends the process without a message, as a crash
# in C does; with the other the runner raises.
CRASHES, RAISES = "\x07", "\x06"
_IMPORT = "from tests.support.engines.poisoned_engine import main"
_PROGRAM = f"import sys; sys.path.insert(0, sys.argv[1]); {_IMPORT}; sys.exit(main())"


class PoisonedRunner(EchoRunner):
    """Fails at the steps that compute a poisonous token, and only there."""

    def launch(self, plan: StepPlan) -> object:
        token_ids = {token_id for chunk in plan.chunks for token_id in chunk.token_ids}
        if ord(CRASHES) in token_ids:
            os._exit(9)
        if ord(RAISES) in token_ids:
            raise RuntimeError("a poisonous token")
        return super().launch(plan)


def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process start poisoned engines."""
    monkeypatch.setattr(link, "_PROGRAM", _PROGRAM)


def main() -> int:
    """Run the engine's own program, with the fault."""
    factory.EchoRunner = PoisonedRunner  # type: ignore[misc]
    return server.main()


if __name__ == "__main__":
    sys.exit(main())
