"""The lab: an answer that its visitor interrupts, beside what the server holds of it."""

from __future__ import annotations

import os
from pathlib import Path

from django.apps import AppConfig

FOLDER = "STREAMSERVE_LAB"  # the variable of the folder of reports; set by project/serve.py for its web processes


class LabConfig(AppConfig):
    """Starts the reports of this process, if project/serve.py has started it."""

    name = "project.lab"

    def ready(self) -> None:
        from project.lab.reports import Reporter

        if folder := os.environ.pop(FOLDER, ""):  # not for the processes that this process starts
            Reporter(Path(folder)).start()
