"""Laws of a site without OpenTelemetry, each in a process of its own: nothing is imported, and nothing fails."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

ANSWER = """
import sys
if {is_blocked}:
    sys.modules["opentelemetry"] = None  # as if it were not installed
import django
django.setup()
from django.core.management import call_command
call_command("migrate", verbosity=0)
from streamserve import complete
from streamserve.web.calls import background
from streamserve.web import site
assert complete("Hello", tenant="shop", max_tokens=3).usage.completion_tokens == 3
background.run(site.reset, "")
assert not [name for name in sys.modules if name.startswith("opentelemetry.")], "imported"
print("answered")
"""

CHECK = """
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "opentelemetry" else find(name, *rest)
import django
from django.conf import settings
settings.STREAMSERVE = {**settings.STREAMSERVE, "TRACING": True}
django.setup()
from django.core.management import call_command
call_command("check")
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings"}
    return subprocess.run([sys.executable, "-c", code], env=environ, text=True, capture_output=True, timeout=300)


@pytest.mark.parametrize("is_blocked", [True, False])
def test_an_answer_imports_nothing(is_blocked: bool) -> None:
    """Neither where the package is missing, nor where it is installed and the site has not set it up."""
    done = run(ANSWER.replace("{is_blocked}", str(is_blocked)))
    assert done.stdout.endswith("answered\n"), done.stderr


def test_a_check_names_the_extra() -> None:
    """With TRACING True and without the package `manage.py check` fails, and says what to install."""
    done = run(CHECK)
    assert done.returncode == 1
    assert "(streamserve.E018) TRACING needs the package opentelemetry-api" in done.stderr
    assert 'pip install "streamserve[otel]"' in done.stderr
