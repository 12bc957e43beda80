"""`python -m streamserve.asgi.flow app:app`: serve any ASGI app with FlowServer. See install.py."""

from __future__ import annotations

from streamserve.asgi.flow.install import main

main()
