"""Topics and passages: the text of the help pages, editable in the admin. Nothing here knows a model or a search."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import ValidationError
from django.core.validators import RegexValidator
from django.db import models
from django.db.models import Count, Max
from django.urls import reverse

from project.help.slots import body_problems, fill, referenced_slugs, resolved, sentence_problems, value_problems

_SLUG = RegexValidator(r"^[a-z0-9]+(?:-[a-z0-9]+)*$", "A slug has lower-case letters, digits and single hyphens.")


class Topic(models.Model):
    """A group of passages, with a heading on the page of all."""

    name = models.CharField(max_length=80, unique=True)

    class Meta:
        ordering = ("name",)

    def __str__(self) -> str:
        return self.name


class PassageQuerySet(models.QuerySet["Passage"]):
    """Queries on passages."""

    def version(self) -> str:
        """Return a text that changes with every passage that is saved, added or deleted through the models."""
        found = self.aggregate(number=Count("pk"), last=Max("pk"), changed=Max("changed_at"))
        return f"{found['number']}/{found['last']}/{found['changed']}"


class Passage(models.Model):
    """One fact of the help: sentences with slots, and the values for these.

    Of a sentence `The Team plan costs {month} per seat a month.` the value `month` is `$15`.
    """

    slug = models.CharField(max_length=60, unique=True, validators=[_SLUG], help_text="The address of its page.")
    topic = models.ForeignKey(Topic, models.PROTECT, related_name="passages")
    title = models.CharField(max_length=160)
    sentences = models.TextField(help_text="Each on a line, as answers show them. A name in braces is a slot: {month}")
    values = models.JSONField(default=dict, blank=True, help_text="Each on a line: month: $15")
    body = models.TextField(blank=True, help_text="More for its page. It may have slots, too.")
    also_asked = models.TextField(blank=True, help_text="Other ways to ask, each on a line. The search reads them.")
    keywords = models.CharField(max_length=300, blank=True, help_text="Further words to search by.")
    changed_at = models.DateTimeField(auto_now=True)

    objects = PassageQuerySet.as_manager()

    class Meta:
        ordering = ("topic__name", "title")

    def __str__(self) -> str:
        return self.title

    def get_absolute_url(self) -> str:
        """Return the address of its page."""
        return reverse("help:passage", args=[self.slug])

    def clean(self) -> None:
        """Raise ValidationError unless each slot has a value and each value a slot."""
        problems: dict[str, Any] = {
            "sentences": sentence_problems(self.sentence_list),
            "body": body_problems(self.body),
        }
        if isinstance(self.values, dict) and all(isinstance(value, str) for value in self.values.values()):
            problems["values"] = value_problems([*self.sentence_list, self.body], self.values)
            problems["values"] += self._reference_problems()
        else:
            problems["values"] = ["Values are texts, each with the name of its slot."]
        if any(problems.values()):
            raise ValidationError({field: found for field, found in problems.items() if found})

    @property
    def sentence_list(self) -> list[str]:
        """The sentences, with their slots."""
        return [line.strip() for line in self.sentences.splitlines() if line.strip()]

    @property
    def text(self) -> str:
        """The sentences, filled."""
        values = self.shown_values()
        return " ".join(fill(sentence, values) for sentence in self.sentence_list)

    @property
    def body_text(self) -> str:
        """The body, filled."""
        return fill(self.body, self.shown_values())

    def shown_values(self) -> dict[str, str]:
        """Return the values, references followed; "?" for the value of a passage that is gone."""
        if not referenced_slugs(self.values):
            return dict(self.values)
        others = self._referenced()
        return {name: _value_or_mark(name, value, others) for name, value in self.values.items()}

    def _reference_problems(self) -> list[str]:
        others = self._referenced()
        return [
            f"{name}: no passage has the value {value[1:]}. Write @slug.name of a value that is there."
            for name, value in self.values.items()
            if _value_or_mark(name, value, others) == "?" != value
        ]

    def _referenced(self) -> dict[str, dict[str, str]]:
        return dict(Passage.objects.filter(slug__in=referenced_slugs(self.values)).values_list("slug", "values"))


def _value_or_mark(name: str, value: str, others: dict[str, dict[str, str]]) -> str:
    try:
        return resolved({name: value}, others)[name]
    except KeyError:
        return "?"
