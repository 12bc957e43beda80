"""The task of docs/jobs.md, as its block is there."""

from __future__ import annotations

from tests.support.docs.doc_blocks import blocks_of

(_block,) = [one for one in blocks_of("docs/jobs.md") if "from django_tasks" in one.text]
exec(compile(_block.code, "docs/jobs.md", "exec"))  # noqa: S102
