"""An app with a pipeline whose tool asks its user, for the pages of ai_sdk_site."""
