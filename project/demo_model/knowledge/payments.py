"""Facts about money moving: refunds, invoices, failed payments, payment methods. Data only."""

from project.demo_model.knowledge.fact import Fact

PAYMENTS: tuple[Fact, ...] = (
    Fact(
        id="refund-policy",
        topic="refunds",
        answer="We refund a first payment in full within 30 days of purchase, no questions asked.",
        key_terms=("in full", "30 days of purchase"),
        keywords="refund money back guarantee policy full",
        questions=(
            "What is your refund policy?",
            "Can I get my money back?",
            "Do you have a money-back guarantee?",
            "I'm not happy, can I have a refund?",
            "how long do I have to ask for a refund",
            "refund deadline",
            "Is a full refund possible?",
            "I bought it last week and want my money returned",
        ),
    ),
    Fact(
        id="refund-how",
        topic="refunds",
        answer="To request a refund, open the invoice in Settings > Billing > History and press Request refund.",
        key_terms=("Request refund",),
        keywords="refund request how ask form button",
        questions=(
            "How do I request a refund?",
            "Where do I ask for my money back?",
            "refund form",
            "I want to claim a refund, what are the steps?",
            "who do i contact for a refund",
            "Where is the refund button?",
            "please refund my payment",
        ),
    ),
    Fact(
        id="refund-time",
        topic="refunds",
        answer="Refunds go back to the original payment method and arrive in 5 to 10 business days.",
        key_terms=("original payment method", "5 to 10 business days"),
        keywords="refund time arrive wait days bank long",
        questions=(
            "How long does a refund take?",
            "When will my refund arrive?",
            "I'm still waiting for my refund",
            "My refund has not shown up yet",
            "refund processing time",
            "how many days until the money is back on my card",
            "Where does the refunded money go?",
        ),
    ),
    Fact(
        id="refund-yearly",
        topic="refunds",
        answer="If you leave a yearly plan early, we refund the unused whole months on request.",
        key_terms=("unused whole months",),
        keywords="refund yearly annual partial prorated unused months",
        questions=(
            "Can I get a partial refund on a yearly plan?",
            "I paid for a year but want to leave now",
            "Do you refund unused months?",
            "annual plan refund",
            "I cancelled my yearly subscription early, do I get something back?",
            "prorated refund for the remaining year",
        ),
    ),
    Fact(
        id="refund-duplicate",
        topic="refunds",
        answer=(
            "If you were charged twice, send us both charge dates; a duplicate charge is returned within 2 "
            "business days."
        ),
        key_terms=("duplicate charge", "2 business days"),
        keywords="charged twice double duplicate charge two payments",
        questions=(
            "I was charged twice",
            "Why do I see two charges?",
            "You billed me double this month",
            "duplicate payment on my card",
            "There are two identical payments on my statement",
            "double charge",
            "the same amount was taken two times",
        ),
    ),
    Fact(
        id="refund-unknown",
        topic="refunds",
        answer=(
            "A charge you do not recognise shows as QLBX on statements. Report it with Report a charge and we "
            "check it the same day."
        ),
        key_terms=("QLBX", "Report a charge"),
        keywords="unknown charge unrecognised statement fraud strange payment",
        questions=(
            "I don't recognise a charge from you",
            "There is a strange payment on my bank statement",
            "What is this charge?",
            "unknown charge on my card",
            "I never bought anything but money was taken",
            "how does quillbox appear on a card statement",
            "suspicious transaction",
        ),
    ),
    Fact(
        id="invoice-where",
        topic="invoices",
        answer="All invoices are in Settings > Billing > History, where each one can be downloaded as a PDF.",
        key_terms=("downloaded as a PDF",),
        keywords="invoice download pdf where find receipt bill history",
        questions=(
            "Where can I find my invoices?",
            "How do I download an invoice?",
            "I need a receipt for my payment",
            "Can I get a PDF of my bill?",
            "invoice pdf",
            "show me my billing history",
            "where are old bills kept",
            "I need proof of payment",
        ),
    ),
    Fact(
        id="invoice-address",
        topic="invoices",
        answer=(
            "To change the company name or address on invoices, edit Billing details; new invoices use it, and "
            "the last one can be reissued."
        ),
        key_terms=("Billing details", "reissued"),
        keywords="invoice company name address change wrong correct billing",
        questions=(
            "How do I change the address on my invoice?",
            "The company name on my bill is wrong",
            "Can you correct an invoice?",
            "add my business name to the invoices",
            "my invoice shows the old address",
            "update billing address",
            "we moved offices, what about the invoices",
        ),
    ),
    Fact(
        id="invoice-email",
        topic="invoices",
        answer="Invoices can be emailed to your accountant: add up to three addresses under Invoice recipients.",
        key_terms=("Invoice recipients", "three addresses"),
        keywords="invoice email send accountant bookkeeping recipients copy",
        questions=(
            "Can you send invoices to my accountant?",
            "How do I get invoices by email?",
            "send bills to another email address",
            "Our bookkeeping department needs the invoices",
            "forward invoices automatically",
            "add a second recipient for receipts",
        ),
    ),
    Fact(
        id="invoice-po",
        topic="invoices",
        answer=(
            "A purchase order number can be printed on invoices: enter it in the PO number field before the renewal."
        ),
        key_terms=("PO number field",),
        keywords="purchase order po number reference invoice",
        questions=(
            "Can I add a purchase order number?",
            "Our finance team needs a PO on the invoice",
            "Where do I enter the PO number?",
            "purchase order reference",
            "put our order reference on the bill",
            "invoice needs a PO",
        ),
    ),
    Fact(
        id="invoice-date",
        topic="invoices",
        answer="Invoices are issued on the first day of each billing period, around 06:00 UTC.",
        key_terms=("first day of each billing period",),
        keywords="invoice date when issued billing day",
        questions=(
            "When are invoices issued?",
            "On which day do I get billed?",
            "What day of the month is the bill created?",
            "invoice date",
            "when will the next bill be generated usually",
            "At what time do you send invoices?",
        ),
    ),
    Fact(
        id="billing-day",
        topic="invoices",
        answer="You can move your billing day once a year: choose a day from 1 to 28 under Billing day.",
        key_terms=("under Billing day", "1 to 28"),
        keywords="billing day move change payment date monthly",
        questions=(
            "Can I change my billing date?",
            "I want to be charged on a different day of the month",
            "move the payment day to after payday",
            "change billing day",
            "Could you bill me on the 15th instead?",
            "shift my payment date",
        ),
    ),
    Fact(
        id="failed-why",
        topic="failed payments",
        answer=(
            "Most failed payments come from an expired card or a bank limit. Update the card, or ask your bank "
            "to allow the charge."
        ),
        key_terms=("expired card", "bank limit"),
        keywords="payment failed declined rejected why card",
        questions=(
            "Why did my payment fail?",
            "My card was declined",
            "The payment did not go through",
            "payment rejected",
            "Why was my card refused?",
            "my bank declined the charge",
            "I get a payment error when I try to pay",
            "transaction failed",
        ),
    ),
    Fact(
        id="failed-retry",
        topic="failed payments",
        answer="After a failed payment we retry on days 1, 3 and 7. You can also press Pay now at any time.",
        key_terms=("1, 3 and 7", "Pay now"),
        keywords="failed payment retry again attempt when pay now",
        questions=(
            "When do you retry a failed payment?",
            "Will you try to charge my card again?",
            "how many times do you attempt the payment",
            "I fixed my card, can I pay right away?",
            "payment retry schedule",
            "Can I trigger the charge again myself?",
        ),
    ),
    Fact(
        id="failed-grace",
        topic="failed payments",
        answer=(
            "There is a grace period of 10 days after a failed payment; only then is the account limited to reading."
        ),
        key_terms=("grace period", "10 days"),
        keywords="grace period failed payment account blocked locked unpaid overdue",
        questions=(
            "Will my account be blocked if a payment fails?",
            "How long do I have to fix a failed payment?",
            "Is there a grace period?",
            "what happens if I don't pay on time",
            "overdue payment consequences",
            "Do you lock me out when the bill is unpaid?",
            "my invoice is late, is my account in danger",
        ),
    ),
    Fact(
        id="failed-3ds",
        topic="failed payments",
        answer=(
            "If your bank asks for 3-D Secure, approve the payment in your banking app within 15 minutes of "
            "starting it."
        ),
        key_terms=("3-D Secure", "15 minutes"),
        keywords="3d secure bank approve authentication verify payment app",
        questions=(
            "My bank asks me to verify the payment",
            "What is 3-D Secure?",
            "The payment needs authentication",
            "3ds verification failed",
            "I have to approve the charge in my banking app",
            "payment confirmation by the bank timed out",
        ),
    ),
    Fact(
        id="method-accepted",
        topic="payment methods",
        answer="We accept Visa, Mastercard, American Express, PayPal and SEPA direct debit.",
        key_terms=("SEPA direct debit", "PayPal"),
        keywords="payment methods accepted cards paypal visa sepa",
        questions=(
            "Which payment methods do you accept?",
            "Can I pay with PayPal?",
            "Do you take American Express?",
            "How can I pay?",
            "payment options",
            "is Visa ok",
            "what cards work",
            "can i pay by direct debit",
        ),
    ),
    Fact(
        id="method-change",
        topic="payment methods",
        answer="To replace your card, open Settings > Billing > Payment method and press Replace card.",
        key_terms=("Replace card",),
        keywords="change card update replace new credit card payment method",
        questions=(
            "How do I update my credit card?",
            "I have a new card",
            "Change my payment method",
            "my card expires soon, how do I replace it",
            "switch to a different bank card",
            "remove the old card and add another",
            "Where can I enter new card details?",
        ),
    ),
    Fact(
        id="method-transfer",
        topic="payment methods",
        answer=(
            "Bank transfer is available for yearly Business plans; ask for a quote and pay within 14 days of the "
            "invoice."
        ),
        key_terms=("Bank transfer", "yearly Business plans"),
        keywords="bank transfer wire invoice pay business quote",
        questions=(
            "Can I pay by bank transfer?",
            "Do you support wire transfers?",
            "We want to pay by invoice",
            "wire payment for a company",
            "our firm has no credit card, can we transfer the money?",
            "bank transfer",
        ),
    ),
    Fact(
        id="method-currency",
        topic="payment methods",
        answer=(
            "You can be billed in US dollars, euros or pounds. The currency is chosen at the first purchase and "
            "changes only at renewal."
        ),
        key_terms=("US dollars, euros or pounds",),
        keywords="currency dollars euros pounds pay billed",
        questions=(
            "Which currencies do you support?",
            "Can I pay in euros?",
            "I'd like to be billed in pounds",
            "change currency",
            "why am I charged in dollars",
            "Is it possible to switch the currency of my bill?",
        ),
    ),
)
