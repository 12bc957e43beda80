"""An app of ours that serves an echo engine which repeats the question: the upstream of another site. For uvicorn."""

from __future__ import annotations

from streamserve.asgi import anyone, app
from streamserve.engine.config import ModelConfig

application = app(models={"m": ModelConfig(alias="m", path="echo", answers={})}, authenticate=anyone)
