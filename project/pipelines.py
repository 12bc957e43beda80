"""The demo site's pipelines. An app's `pipelines.py` is found by itself; see docs/pipelines.md."""

from __future__ import annotations

from project.help.assistant import billing
from project.help.review import account_review
from project.lab.pace import pace
from streamserve import pipeline

pipeline(latency_class="chat", title="Help desk")(billing)
pipeline(permission="authenticated")(account_review)
pipeline()(pace)
