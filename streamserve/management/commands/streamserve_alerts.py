"""`manage.py streamserve_alerts`: print the rules of ALERTS for Prometheus, or a dashboard for Grafana."""

from __future__ import annotations

import json
from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from streamserve.conf import get_settings
from streamserve.protocol.alerts import as_yaml
from streamserve.protocol.dashboard import dashboard


class Command(BaseCommand):
    """Prints a file."""

    help = "Print Prometheus' alert rules of the setting ALERTS, or with --grafana a dashboard with its thresholds."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--grafana", action="store_true", help="print a Grafana dashboard (JSON) instead")

    def handle(self, *args: Any, grafana: bool, **options: Any) -> None:
        alerts = get_settings().alerts
        self.stdout.write(json.dumps(dashboard(alerts), indent=2) if grafana else as_yaml(alerts).rstrip())
