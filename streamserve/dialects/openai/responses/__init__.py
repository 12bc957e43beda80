"""The Responses API: bodies (request.py), items (items.py), and an answer as events or whole (output.py)."""
