"""API keys in the admin: made and shown once, listed, revoked."""

from __future__ import annotations

from typing import Any

from django import forms
from django.contrib import admin
from django.contrib.auth import get_user_model
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils import timezone
from django.utils.formats import date_format
from django.utils.translation import gettext_lazy as _

from streamserve.admin.records import NOTHING, ModelAdmin, RecordAdmin, moment, short
from streamserve.keys import new_key
from streamserve.models import ApiKey, default_scopes
from streamserve.web.model_names import known_names


class KeyForm(forms.ModelForm):  # type: ignore[type-arg]  # generic in its stubs only
    """What a new key may do, and for how long."""

    scopes = forms.MultipleChoiceField(
        label=_("Scopes"),
        choices=[
            ("chat", _("chat: ask, read and stop its own answers")),
            ("ops", _("ops: read /metrics")),
            ("watch", _("watch: read others' answers, if its user may")),
        ],
        initial=default_scopes,
        widget=forms.CheckboxSelectMultiple,
    )
    allowed_models = forms.MultipleChoiceField(
        label=_("Models"),
        choices=lambda: [(name, name) for name in known_names()],
        required=False,
        widget=forms.CheckboxSelectMultiple,
        help_text=_("The models and pipelines that it may use. None chosen: all that its user may."),
    )

    class Meta:
        model = ApiKey
        fields = ("name", "user", "scopes", "allowed_models", "latency_class", "expires_at")


@admin.register(ApiKey)
class ApiKeyAdmin(RecordAdmin):
    """API keys. A new key is shown once, on the page that answers its form; it is neither stored nor logged."""

    form = KeyForm
    list_display = ("prefix", "short_name", "short_user", "may", "state", "created", "used", "until")
    list_filter = (("revoked_at", admin.EmptyFieldListFilter), "created_at")
    search_fields = ("prefix", "name")
    search_help_text = _("A prefix, a name, or the name of a user")
    list_select_related = ("user",)
    owner_columns = ()
    empty_words = _(
        "No key yet. Programs ask with an API key: add it here, or with manage.py streamserve_key. It is shown once."
    )
    actions = ("revoke",)

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        """Return the form's fields for a new key, and what is known of a key that is there."""
        if obj is None:
            return KeyForm.Meta.fields
        return ("name", "prefix", "user", "may", "may_use", "state", "created", "used", "until", "revoked", "streams")

    def get_search_results(self, request: HttpRequest, queryset: QuerySet[Any], search_term: str) -> tuple[Any, bool]:
        """Return the keys that have the words anywhere: they are few."""
        return ModelAdmin.get_search_results(self, request, queryset, search_term)

    def get_search_fields(self, request: HttpRequest) -> Any:
        """Return the key's own columns, and its user's name."""
        return (*self.search_fields, f"user__{get_user_model().USERNAME_FIELD}")

    @admin.display(description=_("scopes"))
    def may(self, key: ApiKey) -> str:
        """Return the scopes, the class that its answers have, and the models that it may use, if not all."""
        may = ", ".join([*key.scopes, *([key.latency_class] if key.latency_class else [])])
        return f"{may}: {', '.join(key.allowed_models)}" if key.allowed_models else may

    used = moment("last_used_at", _("last used"))
    revoked = moment("revoked_at", _("revoked"))

    @admin.display(description=_("models"))
    def may_use(self, key: ApiKey) -> str:
        """Return the models and pipelines that it may use."""
        return ", ".join(key.allowed_models) or str(_("all that its user may"))

    @admin.display(description=_("name"), ordering="name")
    def short_name(self, key: ApiKey) -> str:
        """Return the name, shortened."""
        return short(key.name)

    @admin.display(description=_("user"))
    def short_user(self, key: ApiKey) -> str:
        """Return whose key it is, shortened."""
        return short(str(key.user)) if key.user is not None else NOTHING

    @admin.display(description=_("streams"))
    def streams(self, key: ApiKey) -> str:
        """Return a link to the answers that were asked with the key."""
        return self.listed("streamserve_stream", _("its streams"), tenant=key.tenant, owner=f"key:{key.pk}")

    @admin.display(description=_("expires"), ordering="expires_at")
    def until(self, key: ApiKey) -> str:
        """Return the day."""
        return "–" if key.expires_at is None else date_format(timezone.localtime(key.expires_at), "j M Y")

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """A key is as good as its user's login: see `formfield_for_foreignkey`."""
        return request.user.has_perm("streamserve.add_apikey")

    def formfield_for_foreignkey(self, db_field: Any, request: HttpRequest, **kwargs: Any) -> Any:
        """Let a superuser make keys for every user, and other staff for themselves."""
        if db_field.name == "user" and not request.user.is_superuser:
            kwargs["queryset"] = get_user_model().objects.filter(pk=request.user.pk or 0)
        return super().formfield_for_foreignkey(db_field, request, **kwargs)

    def add_view(
        self, request: HttpRequest, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show the form with one button: whatever is pressed, the key is shown next."""
        no_other_buttons = {"show_save_and_add_another": False, "show_save_and_continue": False}
        return super().add_view(request, form_url, {**(extra_context or {}), **no_other_buttons})

    def save_model(self, request: HttpRequest, obj: ApiKey, form: Any, change: bool) -> None:
        """Make the key; the form's row has its name, user, scopes and end."""
        obj.set_key(key := new_key())
        super().save_model(request, obj, form, change)
        request.streamserve_key = key  # type: ignore[attr-defined]

    def response_add(self, request: HttpRequest, obj: ApiKey, post_url_continue: str | None = None) -> HttpResponse:
        """Show the key, this once. No redirect: that would have to store it."""
        context = {
            **self.admin_site.each_context(request),
            "title": _("The new key"),
            "opts": self.opts,
            "key": request.streamserve_key,  # type: ignore[attr-defined]
            "row": obj,
        }
        response = TemplateResponse(request, "streamserve/admin/new_key.html", context)
        response["Cache-Control"] = "no-store"
        return response

    @admin.action(description=_("Revoke the selected keys"), permissions=("revoke",))
    def revoke(self, request: HttpRequest, queryset: QuerySet[Any]) -> None:
        """Revoke the keys permanently; their running answers end within half a minute."""
        num_revoked = ApiKey.objects.filter(pk__in=queryset.values("pk")).revoke()
        self.message_user(request, _("%(num)d keys revoked.") % {"num": num_revoked})

    def has_revoke_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("streamserve.change_apikey")
