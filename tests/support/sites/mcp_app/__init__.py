"""An app with pipelines for clients of `/mcp`."""
