"""The AI SDK's UI message stream, version 1: `useChat` and its twins (ai 7.0, `ui-message-stream/`)."""
