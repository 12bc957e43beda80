"""`account_review`: a pipeline of four steps that reads an account, works out what could be better, and reports it.

    retrieve   the passages whose values the checks need: prices, seats, storage
    plan       which checks concern this account
    execute    each check: arithmetic on the account and on the values of its passage
    synthesise the findings as an answer, each with its source

A price that was edited in the admin changes the result. The site knows no accounts: it reviews what the request gives,
and where that gives none an example, which the answer names as such. Every step takes and returns JSON, so that a job
can keep what is done. It runs by any delivery; where no reader waits, run it as a job.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from functools import partial
from typing import Any, TypedDict

from django.conf import settings

from project.help.answering import Citations, Markers, SlotFiller, numbered
from project.help.assistant import cite, trimmed
from project.help.search import Hit, hits_of
from project.help.slots import fill
from streamserve import Run
from streamserve.protocol.errors import BadRequest

Account = Mapping[str, Any]

SAMPLE: Account = {"plan": "Team", "pays": "monthly", "seats": 12, "members": 9, "storage_gb": 1150}
EXAMPLE = (
    "This is an example, because no account was given: the {plan} plan, paid {pays}, with {seats} seats for {members} "
    "members and {storage_gb:,} GB of storage in use.\n\n"
).format_map(SAMPLE)
PLANS = ("Solo", "Team", "Business")
MAX_SEATS = 100_000
_MAX_SHOWN_CHARS = 48  # of a caller's text
MAX_FINDINGS = 4
MAX_REVIEW_TOKENS = 800
SYSTEM = (
    "You review a customer's account. Say what the numbered findings say, in at most four sentences, in their order, "
    "with each finding's number in brackets behind its sentence, as [1]. Add nothing."
)


class Finding(TypedDict):
    """What a check has found: a sentence with slots, their values, and the passage that it rests on."""

    check: str
    slug: str
    sentence: str
    values: dict[str, str]
    saving: str  # dollars a month


async def account_review(run: Run) -> None:
    """Review an account: what it costs, and what could cost less. Input: {"account": {…}}; without it, an example."""
    account = account_of(run.input)
    if account is SAMPLE:
        await run.say(EXAMPLE)
    passages = await run.step("Reading the help pages", hits_of, sorted(_SLUGS), of=4, phase="retrieval")
    checks = await run.step("Planning the checks", plan, account, [hit["slug"] for hit in passages], of=4)
    findings = await run.step(f"Checking {_listed(checks)}", execute, account, checks, passages, of=4)
    await run.step("Writing the review", partial(synthesise, run, findings, passages), of=4)


def account_of(given: Mapping[str, Any]) -> Account:
    """Return the account of a request, checked. Raises BadRequest."""
    if "account" not in given:
        return SAMPLE
    account = given["account"]
    if not isinstance(account, Mapping):
        raise _wrong(f"account is an object, as {dict(SAMPLE)}.", "input.account")
    unknown = sorted(account.keys() - SAMPLE.keys())
    if unknown:
        name = unknown[0][:_MAX_SHOWN_CHARS]
        raise _wrong(f"account has no field {name!r}. It has {', '.join(SAMPLE)}.", f"input.account.{name}")
    missing = [name for name in SAMPLE if name not in account]
    if missing:
        message = f"account needs {', '.join(missing)} too: no value is guessed."
        raise BadRequest(message, code="missing_field", param=f"input.account.{missing[0]}")
    if account["plan"] not in PLANS:
        raise _wrong(f"plan is one of {', '.join(PLANS)}.", "input.account.plan")
    if account["pays"] not in ("monthly", "yearly"):
        raise _wrong("pays is monthly or yearly.", "input.account.pays")
    for name in ("seats", "members", "storage_gb"):
        if type(account[name]) is not int or not 0 <= account[name] <= MAX_SEATS:
            raise _wrong(f"{name} is a whole number from 0 to {MAX_SEATS:,}.", f"input.account.{name}")
    return account


def _wrong(message: str, param: str) -> BadRequest:
    return BadRequest(message, code="invalid_value", param=param)


# --- plan, execute ---------------------------------------------------------------------------------------------------


def plan(account: Account, slugs: list[str]) -> list[str]:
    """Return the checks that concern the account and whose passage is there."""
    concerns = {
        "price": True,
        "yearly": account["pays"] == "monthly",
        "seats": account["plan"] != "Solo" and account["seats"] > account["members"],
        "storage": account["plan"] != "Business",
    }
    return [name for name, is_wanted in concerns.items() if is_wanted and set(_needs(name, account)) <= set(slugs)]


def execute(account: Account, checks: list[str], passages: list[Hit]) -> list[Finding]:
    """Run the checks; return what they found, the largest saving first. A value that is no number gives no finding."""
    values = {hit["slug"]: hit["values"] for hit in passages}
    found = []
    for name in checks:
        try:
            finding = CHECKS[name](account, values)
        except (KeyError, ValueError):  # a slot was renamed, or its value is words
            continue
        if finding is not None:
            found.append(Finding(check=name, slug=_needs(name, account)[-1], **finding))
    return sorted(found, key=lambda one: -Decimal(one["saving"]))[:MAX_FINDINGS]


def _price_slug(account: Account) -> str:
    return f"price-{account['plan'].lower()}"


def _needs(check: str, account: Account) -> tuple[str, ...]:
    """Return the slugs of the passages that a check reads; it rests on the last slug."""
    price = _price_slug(account)
    return {
        "price": (price,),
        "yearly": (price, "price-yearly"),
        "seats": (price, "seat-remove"),
        "storage": ("storage-limit",),
    }[check]


_SLUGS = {"price-solo", "price-team", "price-business", "price-yearly", "seat-remove", "storage-limit"}
_WORDS = {"one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6}


def number_in(text: str) -> Decimal:
    """Return the number that a value begins with: `$15`, `100 GB`, `two months`. Raises ValueError."""
    match = re.match(r"\$?\s*([\d,]*\.?\d+)", text)
    if match:
        return Decimal(match[1].replace(",", ""))
    word = text.split()[0].lower() if text.split() else ""
    if word not in _WORDS:
        raise ValueError(f"{text!r} begins with no number")
    return Decimal(_WORDS[word])


def dollars(amount: Decimal) -> str:
    """Return an amount as prices are written: $8, $1,020, $7.50."""
    return f"${amount:,.0f}" if amount == amount.to_integral_value() else f"${amount:,.2f}"


def _monthly(account: Account, values: Mapping[str, Mapping[str, str]]) -> tuple[Decimal, int]:
    """Return the price of a seat and month, and the number of seats."""
    seats = 1 if account["plan"] == "Solo" else account["seats"]
    return number_in(values[_price_slug(account)]["month"]), seats


def _check_price(account: Account, values: Mapping[str, Mapping[str, str]]) -> dict[str, Any] | None:
    price, seats = _monthly(account, values)
    texts = {"bill": dollars(price * seats), "plan": account["plan"], "seats": f"{seats:,}", "price": dollars(price)}
    sentence = "The {plan} plan costs this account {bill} a month: {seats} times {price}."
    return {"sentence": sentence, "values": texts, "saving": "0"}


def _check_yearly(account: Account, values: Mapping[str, Mapping[str, str]]) -> dict[str, Any] | None:
    price, seats = _monthly(account, values)
    months = number_in(values["price-yearly"]["free"])
    texts = {"saving": dollars(price * seats * months), "free": values["price-yearly"]["free"]}
    sentence = "Paying yearly would save {saving} a year, because {free} are free."
    return {"sentence": sentence, "values": texts, "saving": str(round(price * seats * months / 12, 2))}


def _check_seats(account: Account, values: Mapping[str, Mapping[str, str]]) -> dict[str, Any] | None:
    price, seats = _monthly(account, values)
    unused = seats - account["members"]
    texts = {"unused": f"{unused:,}", "seats": f"{seats:,}", "saving": dollars(price * unused)}
    sentence = "Unused seats: {unused} of {seats}; removing them saves {saving} a month from the next renewal."
    return {"sentence": sentence, "values": texts, "saving": str(price * unused)}


def _check_storage(account: Account, values: Mapping[str, Mapping[str, str]]) -> dict[str, Any] | None:
    each = number_in(values["storage-limit"][account["plan"].lower()])
    limit = each * (1 if account["plan"] == "Solo" else account["seats"])
    if account["storage_gb"] < limit * Decimal("0.8"):
        return None
    texts = {"used": f"{account['storage_gb']:,} GB", "limit": f"{limit:,.0f} GB"}
    return {"sentence": "Storage is nearly full: {used} of {limit} are used.", "values": texts, "saving": "0"}


Check = Callable[[Account, Mapping[str, Mapping[str, str]]], dict[str, Any] | None]
CHECKS: Mapping[str, Check] = {
    "price": _check_price,
    "yearly": _check_yearly,
    "seats": _check_seats,
    "storage": _check_storage,
}


def _listed(checks: list[str]) -> str:
    return ", ".join(checks) or "nothing"


# --- synthesise ------------------------------------------------------------------------------------------------------


async def synthesise(run: Run, findings: list[Finding], passages: list[Hit]) -> None:
    """Have the model write the findings, each with the passage that it rests on."""
    if not findings:
        await run.say("There is nothing to report: the help pages have no prices to compare with.")
        return
    by_slug = {hit["slug"]: hit for hit in passages}
    hits = [_as_hit(one, by_slug[one["slug"]]) for one in findings]
    hits = await trimmed(run, hits)
    citations = Citations(partial(cite, run))
    if settings.HELP_ANSWERS == "slots":
        await run.generate(
            "Review my account.",
            grammar={"type": "choice", "choices": [" ".join(numbered(hit, at)[0] for at, hit in enumerate(hits))]},
            through=SlotFiller(hits, citations),
            max_tokens=MAX_REVIEW_TOKENS,
            temperature=0,
        )
        return
    listed = "\n".join(f"[{number}] {hit['text']}" for number, hit in enumerate(hits, 1))
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": listed}]
    await run.generate(messages, through=Markers(hits, citations), max_tokens=MAX_REVIEW_TOKENS, temperature=0)


def _as_hit(finding: Finding, passage: Hit) -> Hit:
    """Return the passage with the finding's sentence in the place of its own."""
    text = fill(finding["sentence"], finding["values"])
    return Hit(**{**passage, "sentences": [finding["sentence"]], "values": finding["values"], "text": text})
