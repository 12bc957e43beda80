"""The Messages API: bodies, conversations, the events of a message, errors and models (anthropic 2.12, `types/`)."""
