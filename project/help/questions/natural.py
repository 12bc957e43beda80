"""Forty questions as people type them, written before the search could spell or knew another language than English.

Typing errors, single words, questions that lean on the question before, four other languages. Do not tune on them: a
change is tried on `dev.py`, and measured here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Natural:
    """A question, and the pages that answer it: any of them is right first. No page means that the answer declines.

    `earlier` is the question before it, `language` the language that it is asked in.
    """

    kind: str
    text: str
    pages: tuple[str, ...]
    earlier: str = ""
    language: str = "en"


def _ask(kind: str, text: str, *pages: str, earlier: str = "", language: str = "en") -> Natural:
    return Natural(kind=kind, text=text, pages=pages, earlier=earlier, language=language)


NATURAL: tuple[Natural, ...] = (
    _ask("about", "What is Quillbox?", "about-quillbox"),
    _ask("about", "what can i do with this", "about-quillbox"),
    _ask("about", "What does it cost?", "about-prices"),
    _ask("about", "Is it free?", "price-free"),
    _ask("about", "do I have to pay anything to look around first?", "trial-length", "trial-card", "price-free"),
    _ask("about", "does it work on my ipad", "app-platforms"),
    _ask("typo", "how do i cancle my subscribtion", "cancel-how"),
    _ask("typo", "refnd polcy", "refund-policy"),
    _ask("typo", "forgot my pasword", "login-forgot"),
    _ask("typo", "is there a studnet discont", "discount-student"),
    _ask("typo", "can i pay with paypall", "method-accepted"),
    _ask("typo", "wher is my invioce", "invoice-where"),
    _ask("typo", "exprot a notebok to pdf", "export-format"),
    _ask("typo", "how much does the buisness plan cost", "price-business"),
    _ask("follow-up", "how long can it stay like that", "pause-length", earlier="How do I pause my subscription?"),
    _ask("follow-up", "and for a whole year?", "price-yearly", earlier="What does the Team plan cost?"),
    _ask("follow-up", "what about charities", "discount-nonprofit", earlier="Is there a discount for students?"),
    _ask("follow-up", "can I undo that?", "delete-restore", earlier="How do I delete my account?"),
    _ask("follow-up", "will I lose my notes then?", "cancel-data", earlier="How do I cancel?"),
    _ask("follow-up", "it's full, what now", "storage-full", earlier="How much storage do I get?"),
    _ask("follow-up", "how soon will I have the money", "refund-time", earlier="How do I request a refund?"),
    _ask("one word", "pricing", "about-prices"),
    _ask("one word", "refund", "refund-policy", "refund-how"),
    _ask("one word", "invoices", "invoice-where"),
    _ask("one word", "offline", "app-offline"),
    _ask("one word", "GDPR", "privacy-gdpr"),
    _ask("one word", "shipping", "ship-time", "ship-cost", "ship-countries"),
    _ask("language", "Was kostet der Team-Tarif?", "price-team", language="de"),
    _ask("language", "Wie kann ich kündigen?", "cancel-how", language="de"),
    _ask("language", "Puis-je être remboursé ?", "refund-policy", "refund-how", language="fr"),
    _ask("language", "Où se trouvent mes factures ?", "invoice-where", language="fr"),
    _ask("language", "¿Hay una aplicación para Android?", "app-platforms", language="es"),
    _ask("language", "Olvidé mi contraseña, ¿qué hago?", "login-forgot", language="es"),
    _ask("language", "Quillboxとは何ですか？", "about-quillbox", language="ja"),
    _ask("language", "返金してもらえますか？", "refund-policy", "refund-how", language="ja"),
    _ask("none", "Wie wird das Wetter morgen in Hamburg?", language="de"),
    _ask("none", "明日の天気はどうですか？", language="ja"),
    _ask("none", "can you write me a poem about cats"),
    _ask("none", "who won the world cup in 2014"),
    _ask("none", "can I play chess in it?"),
)
