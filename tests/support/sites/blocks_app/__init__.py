"""An app with a pipeline, for the pages of blocks_site."""
