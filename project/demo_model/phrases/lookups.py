"""Account look-ups: what people ask, which field the tool call names, possible values, and the answer. Data only."""

# Packed rows: one phrase a line would be thousands of lines.
# fmt: off
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """One field of an account; `answer` has one `{v}` for the value the tool gave back."""

    field: str
    questions: tuple[str, ...]
    values: tuple[str, ...]
    answer: str


LOOKUPS: tuple[Lookup, ...] = (
    Lookup(field="plan", values=("Solo", "Team", "Business", "Reader"), answer="You are on the {v} plan.",
        questions=("What plan am I on?", "Which plan do I have right now?", "what's my current plan",
            "Look up my plan", "Tell me which subscription I have",
                   "check my plan please", "am I on Solo or Team?", "which tier is my account", "Do I have Business?")),
    Lookup(field="status", values=("active", "paused", "cancelled", "overdue", "in trial"),
        answer="Your account is {v}.",
        questions=("Is my account active?", "What's the status of my account?", "Check my account status",
            "Am I still subscribed?", "is my subscription paused at the moment",
                   "Can you see if my plan is active?", "look at my account",
                   "Has my account been cancelled already?")),
    Lookup(field="next_invoice", values=("1 December", "1 January", "15 January", "28 February", "1 March", "12 June"),
        answer="Your next invoice comes on {v}.",
        questions=("When is my next invoice?", "When do I pay next?", "What is my next billing date?",
            "when will you charge me next", "Look up my next payment",
                   "date of my next bill", "Which day is my next charge?")),
    Lookup(field="balance", values=("$0", "$8", "$15", "$30", "$45", "$80", "$290"), answer="Your open balance is {v}.",
        questions=("What is my balance?", "Do I owe you anything?", "How much do I owe?", "check my open balance",
            "Is there an unpaid amount on my account?",
                   "What do I still have to pay?", "show my balance")),
    Lookup(field="seats_used", values=("1", "2", "3", "5", "8", "12", "20"), answer="You are using {v} seats.",
        questions=("How many seats am I using?", "How many seats are taken on our team?", "check our seat usage",
            "number of seats used on my account",
                   "How many people are in my team now?", "look up how many licenses we use",
                   "our current seat count")),
    Lookup(field="payment_method", values=("Visa", "Mastercard", "PayPal", "SEPA direct debit"),
        answer="You pay by {v}.",
        questions=("Which card is on my account?", "What payment method do I use?", "How am I paying at the moment?",
            "which card do you have on file for me",
                   "look up my payment method", "see what card I registered", "Tell me my saved payment method")),
    Lookup(field="last_payment", values=("paid", "failed", "pending", "refunded"), answer="Your last payment is {v}.",
        questions=("Did my last payment go through?", "What happened to my last payment?", "check my latest payment",
            "status of my most recent payment",
                   "Have you received my payment?", "Was my last bill paid?", "look up my last transaction")),
    Lookup(field="storage_used", values=("1 GB", "2 GB", "4 GB", "7 GB", "9 GB", "40 GB"),
        answer="You are using {v} of storage.",
        questions=("How much storage am I using?", "How full is my storage right now?", "check my disk usage",
            "my current storage usage",
                   "How many gigabytes have I used?", "look up my used space",
                   "What space do my notebooks take at present?")),
    Lookup(field="renewal_date", values=("3 January", "9 April", "20 May", "1 August", "30 October"),
        answer="Your plan renews on {v}.",
        questions=("When does my plan renew?", "What's my renewal date?", "check when my subscription renews",
            "on what date will my plan be renewed",
                   "look up my renewal", "Until when is my current plan paid?", "my renewal day")),
    Lookup(field="order", values=("packed", "on its way", "delivered", "delayed"), answer="Your latest order is {v}.",
        questions=("What's the state of my latest order?", "Check my order please", "look up my order",
            "see whether my order has left", "what is my order status",
                   "Can you check my last order for me?", "status of the order I placed")),
)
WAITING: tuple[str, ...] = ("", "", "", "Let me look that up. ", "One moment, I check your account. ")
