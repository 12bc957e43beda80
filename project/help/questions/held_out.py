"""Sixty held-out questions for the billing assistant, written before its retrieval was. Do not tune anything on them.

44 ask for a fact of `benchmarks/demo_model/knowledge/`. Eight ask for a fact whose value was edited: the answer must
state the new value. Eight ask for a fact that the knowledge base has not, four of them because its passage was
removed: the answer must cite nothing. They share no run of five words with a fact, its keywords or its training
questions (a test looks).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """A question as a customer would type it.

    `fact_id`: the fact, and the slug of the passage, that answers it; None where none does. Before the question is
    asked, the words `old` become `new` in that passage's values, and the passage `removed` is deleted.
    """

    text: str
    fact_id: str | None = None
    old: str = ""
    new: str = ""
    removed: str | None = None


def _ask(fact_id: str, text: str, old: str = "", new: str = "") -> HeldOut:
    return HeldOut(text=text, fact_id=fact_id, old=old, new=new)


PRESENT: tuple[HeldOut, ...] = (
    _ask("pause-how", "We shut down over winter. Where do I find the switch to pause what we pay for?"),
    _ask("pause-length", "What is the longest break from my subscription that you allow?"),
    _ask("pause-cost", "Will I be charged in the meantime if I put things on hold?"),
    _ask("pause-resume", "I'm back sooner than planned, how can my paused plan start again today?"),
    _ask("cancel-how", "Which clicks does it take to cancel and be done with it?"),
    _ask("cancel-data", "What becomes of everything I wrote once my subscription has been cancelled?"),
    _ask("trial-length", "For how many days can I try Quillbox before paying?"),
    _ask("trial-second", "I tried you out last year already. Am I allowed another trial with the same address?"),
    _ask("renewal-reminder", "Will somebody warn me by email before my yearly plan renews?"),
    _ask("renewal-price", "How far ahead would we learn about a price increase?"),
    _ask("refund-how", "I'd like my money back for last month's invoice; what must I press?"),
    _ask("refund-yearly", "I paid for twelve months and want out after five. Is the remainder paid back?"),
    _ask("refund-unknown", "There is an entry QLBX on my bank statement, and I can't place it."),
    _ask("invoice-where", "For my tax return I need PDFs of every bill so far; where are they kept?"),
    _ask("invoice-email", "Could our bookkeeper receive each invoice automatically in her own mailbox?"),
    _ask("billing-day", "Can the charge come on the 15th rather than on the 1st of the month?"),
    _ask("failed-retry", "My payment bounced yesterday. When will you attempt it again?"),
    _ask("failed-3ds", "My bank shows a confirmation prompt for 3-D Secure; how many minutes have I got?"),
    _ask("method-accepted", "Is American Express okay, or only Visa?"),
    _ask("method-transfer", "Can our finance department wire the amount by bank transfer?"),
    _ask("method-currency", "Is it possible to be charged in pounds rather than dollars?"),
    _ask("price-team", "What would a seat on Team run us every month?"),
    _ask("price-business", "How expensive is Business for each seat?"),
    _ask("price-free", "Is there any way to use Quillbox without paying a cent?"),
    _ask("upgrade-how", "Solo has become too small for me; how do I move up to something bigger?"),
    _ask("switch-yearly", "We pay each month now and would rather pay once a year. Where is that changed?"),
    _ask("plan-proration", "How is the amount worked out if we change plan halfway through a month?"),
    _ask("tax-vat", "Do the prices on your website already contain VAT?"),
    _ask("discount-nonprofit", "We run a registered charity. Do you lower the price for nonprofits?"),
    _ask("discount-code-fails", "Checkout keeps rejecting my promo code, what could be the reason?"),
    _ask("login-locked", "I mistyped my password so often that I'm shut out. How long until I can try once more?"),
    _ask("login-sessions", "I forgot to sign out on a library computer; can I end that session from home?"),
    _ask("2fa-sms", "Could you text the sign-in code to my mobile by SMS?"),
    _ask("security-encryption", "Are my notebooks encrypted while they sit on your servers?"),
    _ask("language-change", "Can I have the menus in Italian?"),
    _ask("delete-restore", "I deleted my account on Monday and regret it. Can it be brought back?"),
    _ask("seat-guest", "Do outsiders who only comment need a paid seat?"),
    _ask(
        "member-remove", "A colleague quits on Friday: how do I take her out of the team, and who gets her notebooks?"
    ),
    _ask("role-owner", "Our founder is leaving; how can she hand the ownership to me?"),
    _ask("share-stop", "A link I sent around should no longer open my notebook. What do I press?"),
    _ask("export-time", "I requested an export of everything an hour ago. When should it be ready?"),
    _ask("trash-restore", "I threw away a page by mistake three weeks ago; can I get it back?"),
    _ask("api-limit", "How often may my script call the API each minute?"),
    _ask("ship-lost", "My parcel has been missing for nearly a month, will you send another?"),
)

EDITED: tuple[HeldOut, ...] = (
    _ask("price-solo", "What's the monthly price of Solo for one person?", "$8", "$9"),
    _ask("trial-extend", "Could I get some more days on my trial?", "7", "10"),
    _ask("storage-limit", "How much room do we get for files on Team?", "100", "120"),
    _ask("discount-student", "I teach at a school, how much cheaper is Solo for me?", "50", "40"),
    _ask("gift-expiry", "My aunt bought me a gift card ages ago, for how long is it good?", "3", "5"),
    _ask("file-size", "How large may one attachment be?", "250", "400"),
    _ask("support-hours", "From when to when are people at the help desk around?", "8:00", "9:00"),
    _ask("failed-grace", "How many days go by after a failed payment before my account is restricted?", "10", "14"),
)

ABSENT: tuple[HeldOut, ...] = (
    HeldOut(text="Do you sell a lifetime licence?"),
    HeldOut(text="Is there a browser extension for clipping web pages?"),
    HeldOut(text="Can I play music inside a notebook?"),
    HeldOut(text="What is the ticker symbol of your company's shares?"),
    HeldOut(text="Who pays the import duty on a parcel to Brazil?", removed="ship-customs"),
    HeldOut(text="Do you hold webinars for beginners?", removed="support-training"),
    HeldOut(text="Can my phone's camera turn handwriting into text?", removed="app-scan"),
    HeldOut(text="Does user provisioning over SCIM work?", removed="sso-scim"),
)

HELD_OUT: tuple[HeldOut, ...] = PRESENT + EDITED + ABSENT
