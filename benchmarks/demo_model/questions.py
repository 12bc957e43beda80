"""Held-out questions, written by hand: forty about the help desk's topics, each with its fact, and ten it must decline.

The corpus generator never reads this file, and no run of five words here stands anywhere in the corpus (a test
generates the corpus and looks).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question as a customer would type it, and the id of the fact that answers it."""

    text: str
    fact_id: str


QUESTIONS: tuple[Question, ...] = (
    Question(text="I'm going abroad until March. Could you put my membership on ice?", fact_id="pause-how"),
    Question(text="For how many months at most may I leave my subscription paused?", fact_id="pause-length"),
    Question(text="Would any money leave my account as long as the subscription is paused?", fact_id="pause-cost"),
    Question(text="Please explain to me how one cancels a Quillbox subscription.", fact_id="cancel-how"),
    Question(text="Once I've cancelled, how much longer can I keep using it?", fact_id="cancel-when"),
    Question(
        text="Are my notebooks deleted straight after cancelling, or do you hold on to them?", fact_id="cancel-data"
    ),
    Question(text="Does cancelling early come with some kind of fee?", fact_id="cancel-fee"),
    Question(text="How many days of free trial does a new customer get?", fact_id="trial-length"),
    Question(text="Must I hand over credit card details for starting the trial?", fact_id="trial-card"),
    Question(text="I would like to switch off the automatic renewal, where's that?", fact_id="renewal-auto"),
    Question(text="Within how many days of buying can I still get a full refund?", fact_id="refund-policy"),
    Question(text="You promised a refund last Tuesday; by when should it reach my bank?", fact_id="refund-time"),
    Question(text="Help! This month's fee was charged twice on my Visa.", fact_id="refund-duplicate"),
    Question(
        text="For bookkeeping I have to download the PDF invoices of the past quarter, where are they?",
        fact_id="invoice-where",
    ),
    Question(
        text="Our invoices still carry the former company address. How is that corrected?", fact_id="invoice-address"
    ),
    Question(text="Any idea why my bank card keeps being declined by you?", fact_id="failed-why"),
    Question(
        text="When a payment fails, how many days of grace do I get before you block the account?",
        fact_id="failed-grace",
    ),
    Question(text="Would PayPal or Mastercard be fine for paying?", fact_id="method-accepted"),
    Question(text="The bank gave me a new credit card, where should I enter it?", fact_id="method-change"),
    Question(text="As a lone freelancer, how much would the Solo plan set me back each month?", fact_id="price-solo"),
    Question(text="Do we save anything by paying for the entire year rather than monthly?", fact_id="price-yearly"),
    Question(
        text="We would love to upgrade from Solo to Team this afternoon, how does that go?", fact_id="upgrade-how"
    ),
    Question(text="Business is overkill for us, how could we downgrade to a smaller plan?", fact_id="downgrade-how"),
    Question(text="In which field should our firm's VAT number be typed?", fact_id="tax-vat-id"),
    Question(text="I'm studying at college, is a student discount offered?", fact_id="discount-student"),
    Question(text="My password has slipped my memory completely, how can it be reset?", fact_id="login-forgot"),
    Question(text="Which steps does enabling two-factor authentication take?", fact_id="2fa-on"),
    Question(text="My phone was stolen, so the authenticator codes are gone. How can I sign in?", fact_id="2fa-lost"),
    Question(text="My email address changed, where could I update that?", fact_id="email-change"),
    Question(text="Please wipe my account and erase all data permanently.", fact_id="delete-account"),
    Question(text="What steps are needed for buying two additional seats?", fact_id="seat-add"),
    Question(text="I'd love to invite my new colleague, where is the invite button?", fact_id="member-invite"),
    Question(text="May employees sign on with Okta through SAML?", fact_id="sso-setup"),
    Question(text="Before leaving I'd like to export all of my data, how?", fact_id="export-all"),
    Question(text="How many gigabytes of storage come with each plan?", fact_id="storage-limit"),
    Question(text="How many API requests per minute does one key allow?", fact_id="api-limit"),
    Question(text="Roughly how many days until a parcel gets delivered in Spain?", fact_id="ship-time"),
    Question(text="My nephew gave me a Quillbox gift card. How should I redeem it?", fact_id="gift-redeem"),
    Question(text="On what days and hours can your support staff be reached?", fact_id="support-hours"),
    Question(text="In what country do you keep our data on servers?", fact_id="privacy-where"),
)

OFF_TOPIC: tuple[str, ...] = (
    "Will there be snow in Denver this weekend?",
    "Compose four rhyming lines on my goldfish, would you?",
    "Which mushrooms can I put into a creamy soup?",
    "Please debug this JavaScript loop, it never terminates.",
    "My knee hurts after jogging, what ointment would you suggest?",
    "Which party deserves my vote on Sunday?",
    "How much is 37 multiplied by 12?",
    "Who scored the winning goal in last night's final?",
    "Summarise the causes of the First World War.",
    "Suggest a three-day itinerary for Lisbon, please.",
)
