"""The help pages in the admin: a passage with its sentences, and its values, each on a line."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import admin
from django.core.exceptions import ValidationError
from django.utils import timezone
from django.utils.formats import date_format

from project.help.models import Passage, Topic


class ValuesField(forms.CharField):
    """A dict of texts, written as `name: value`, each on a line."""

    widget = forms.Textarea(attrs={"rows": 4, "cols": 60})

    def prepare_value(self, value: Any) -> Any:
        """Return the dict as lines; what the user has typed stays."""
        return "\n".join(f"{name}: {text}" for name, text in value.items()) if isinstance(value, dict) else value

    def clean(self, value: Any) -> dict[str, str]:
        """Return the lines as a dict. Raises ValidationError."""
        values: dict[str, str] = {}
        for line in str(super().clean(value) or "").splitlines():
            name, colon, text = (part.strip() for part in line.partition(":"))
            if not line.strip():
                continue
            if not colon:
                raise ValidationError(f'"{line.strip()}" has no colon. Write name: value, each on a line.')
            if name in values:
                raise ValidationError(f"{name} appears twice.")
            values[name] = text
        return values

    def has_changed(self, initial: Any, data: Any) -> bool:
        """Compare the lines, not the dict with them."""
        return super().has_changed(self.prepare_value(initial or {}), data)


class PassageForm(forms.ModelForm):
    """Checks slots against values by `Passage.clean`."""

    values = ValuesField(required=False, help_text="Each on a line, as month: $15. Each is used by a slot: {month}")

    class Meta:
        model = Passage
        fields = ("title", "slug", "topic", "sentences", "values", "body", "also_asked", "keywords")
        widgets = {  # noqa: RUF012  (Django's own declaration)
            "sentences": forms.Textarea(attrs={"rows": 3, "cols": 100}),
            "body": forms.Textarea(attrs={"rows": 5, "cols": 100}),
            "also_asked": forms.Textarea(attrs={"rows": 6, "cols": 60}),
        }


@admin.register(Passage)
class PassageAdmin(admin.ModelAdmin):
    """One row a passage; its page is linked."""

    form = PassageForm
    list_display = ("title", "topic", "said", "changed")
    list_filter = ("topic",)
    list_select_related = ("topic",)
    search_fields = ("title", "slug", "sentences", "values", "also_asked")
    prepopulated_fields = {"slug": ("title",)}  # noqa: RUF012  (Django's own declaration)

    @admin.display(description="text")
    def said(self, passage: Passage) -> str:
        """Return its filled sentences."""
        return passage.text

    @admin.display(description="changed", ordering="changed_at")
    def changed(self, passage: Passage) -> str:
        """Return when, without the year."""
        return date_format(timezone.localtime(passage.changed_at), "j M, H:i")


@admin.register(Topic)
class TopicAdmin(admin.ModelAdmin):
    """A topic has a name only."""

    search_fields = ("name",)
