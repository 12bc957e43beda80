"""An app with a pipeline that asks its user, for web processes that are killed."""
