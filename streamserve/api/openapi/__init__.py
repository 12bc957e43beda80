"""`/openapi.json`: the routes as an OpenAPI 3.1 document, made from the tables that serve and validate. Values only."""
