"""An app with a pipeline that shows all that AG-UI has, for agents_site."""
