"""An app that bills answers, as that of docs/signals.md; its rows are not unique, so that a second bill would show."""
