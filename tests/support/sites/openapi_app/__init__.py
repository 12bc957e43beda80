"""An app with pipelines, for the site of openapi_site.py."""
