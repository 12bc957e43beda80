"""Facts about the life of a subscription: pausing, cancelling, trials, renewals. Data only."""

from project.demo_model.knowledge.fact import Fact

SUBSCRIPTION: tuple[Fact, ...] = (
    Fact(
        id="pause-how",
        topic="pausing",
        answer=(
            "To pause, open Settings > Billing and choose Pause subscription. The pause starts at the end of the "
            "period you have paid for."
        ),
        key_terms=("Pause subscription", "end of the period"),
        keywords="pause hold freeze suspend break subscription",
        questions=(
            "How do I pause my subscription?",
            "Can I put my plan on hold?",
            "I want to freeze my account for a while",
            "where is the pause button",
            "Is it possible to take a break from my subscription?",
            "how can i suspend my membership temporarily",
            "I'd like to stop for a bit and come back later",
            "pause subscription",
        ),
    ),
    Fact(
        id="pause-length",
        topic="pausing",
        answer=(
            "A pause can last from one month up to six months. After six months the subscription resumes by "
            "itself unless you cancel it."
        ),
        key_terms=("six months", "resumes by itself"),
        keywords="pause maximum length duration months limit long",
        questions=(
            "How long can I pause for?",
            "What is the longest pause allowed?",
            "maximum pause duration",
            "For how many months may my plan stay on hold?",
            "Is there a time limit on pausing?",
            "can a pause last a whole year",
            "how much time can my subscription be frozen",
        ),
    ),
    Fact(
        id="pause-cost",
        topic="pausing",
        answer=(
            "A paused subscription costs nothing: no charge is made while it is on hold, and your remaining days "
            "are kept."
        ),
        key_terms=("costs nothing", "remaining days"),
        keywords="pause cost price fee charge free hold",
        questions=(
            "Do I pay while my subscription is paused?",
            "Is pausing free?",
            "will you charge me during a pause",
            "what does it cost to put the plan on hold",
            "Am I billed when my account is frozen?",
            "pause fee",
            "Does a paused plan still take money from my card?",
        ),
    ),
    Fact(
        id="pause-data",
        topic="pausing",
        answer="While you are paused your notebooks stay safe and readable, but you cannot edit them until you resume.",
        key_terms=("readable", "until you resume"),
        keywords="pause data notebooks access read edit notes while paused",
        questions=(
            "What happens to my notebooks while I am paused?",
            "Can I still read my notes during a pause?",
            "do I lose my data if I pause",
            "Will my content be deleted when the plan is on hold?",
            "can i edit notes while paused",
            "access to notes during pause",
            "Are my files kept when I freeze the account?",
        ),
    ),
    Fact(
        id="pause-resume",
        topic="pausing",
        answer="To end a pause early, press Resume now in Settings > Billing. Billing restarts the same day.",
        key_terms=("Resume now", "restarts the same day"),
        keywords="resume unpause restart reactivate end pause early",
        questions=(
            "How do I resume my subscription?",
            "I want to unpause",
            "How can I end the pause early?",
            "reactivate a paused plan",
            "I'm back, how do I restart my paused account?",
            "where do i switch the plan on again after a pause",
            "take my subscription off hold",
        ),
    ),
    Fact(
        id="cancel-how",
        topic="cancelling",
        answer=(
            "You can cancel any time in Settings > Billing > Cancel plan. No call or email is needed, and you "
            "get a confirmation message at once."
        ),
        key_terms=("Cancel plan", "confirmation message"),
        keywords="cancel stop end terminate quit leave unsubscribe",
        questions=(
            "How do I cancel my subscription?",
            "I want to cancel",
            "Where can I end my plan?",
            "how to unsubscribe",
            "I don't want to use Quillbox any more",
            "Please terminate my membership",
            "what do I have to do to quit",
            "cancel my account please",
            "how can I get rid of my subscription",
            "stop my plan for good",
        ),
    ),
    Fact(
        id="cancel-when",
        topic="cancelling",
        answer=(
            "After you cancel, the plan keeps working until the last day you have paid for, then the account "
            "moves to read-only."
        ),
        key_terms=("last day you have paid for", "read-only"),
        keywords="cancel after access until when effective immediately end date",
        questions=(
            "When does my cancellation take effect?",
            "Can I still use Quillbox after I cancel?",
            "Does it stop immediately when I cancel?",
            "how long do I keep access after cancelling",
            "Is my plan cut off straight away if I cancel?",
            "cancellation effective date",
            "I cancelled today, when do I lose access?",
        ),
    ),
    Fact(
        id="cancel-data",
        topic="cancelling",
        answer=(
            "After cancelling, your notebooks are kept for 90 days. Come back within that time and everything is "
            "still there; later it is erased."
        ),
        key_terms=("90 days", "erased"),
        keywords="cancel data kept deleted retention notebooks after cancellation",
        questions=(
            "What happens to my data after I cancel?",
            "Do you delete my notebooks when I cancel?",
            "How long is my content kept after cancellation?",
            "will my notes be gone if i quit",
            "data retention after leaving",
            "Do I lose all my notes once the plan ends?",
            "are my pages stored after I unsubscribe",
        ),
    ),
    Fact(
        id="cancel-fee",
        topic="cancelling",
        answer=(
            "There is no cancellation fee on any plan, monthly or yearly. You only pay for the time already started."
        ),
        key_terms=("no cancellation fee",),
        keywords="cancel fee penalty charge cost leaving early termination",
        questions=(
            "Is there a cancellation fee?",
            "Do I have to pay to cancel?",
            "Any penalty for leaving early?",
            "what does cancelling cost",
            "Will I be charged something for ending my plan?",
            "early termination fee",
            "does quitting cost money",
        ),
    ),
    Fact(
        id="cancel-undo",
        topic="cancelling",
        answer=(
            "Changed your mind? Press Keep my plan in Settings > Billing before the period ends and the "
            "cancellation is withdrawn."
        ),
        key_terms=("Keep my plan", "withdrawn"),
        keywords="undo cancellation reverse changed mind keep restore mistake",
        questions=(
            "Can I undo a cancellation?",
            "I cancelled by mistake",
            "How do I take back my cancellation?",
            "I changed my mind about cancelling",
            "reverse cancellation",
            "can i keep my subscription after all",
            "I did not mean to cancel, what now?",
        ),
    ),
    Fact(
        id="cancel-reactivate",
        topic="cancelling",
        answer=(
            "To come back after your plan has ended, sign in and choose Reactivate. The current price of the "
            "plan applies."
        ),
        key_terms=("choose Reactivate", "current price"),
        keywords="reactivate rejoin come back return resubscribe ended again",
        questions=(
            "How do I come back after my plan ended?",
            "Can I rejoin later?",
            "I left last month and want to return",
            "resubscribe to quillbox",
            "how do former customers sign up again",
            "reactivate an ended subscription",
            "I was a member before, how do I start again?",
        ),
    ),
    Fact(
        id="trial-length",
        topic="trial",
        answer="The free trial lasts 14 days and includes every feature of the Team plan.",
        key_terms=("14 days", "Team plan"),
        keywords="free trial length days how long try test period",
        questions=(
            "How long is the free trial?",
            "Can I try Quillbox for free?",
            "Do you have a trial?",
            "how many days is the test period",
            "what does the trial include",
            "free trial length",
            "Is there a way to test it before buying?",
            "which features do I get in the trial",
        ),
    ),
    Fact(
        id="trial-card",
        topic="trial",
        answer="No credit card is needed to start a trial; an email address is enough.",
        key_terms=("No credit card", "email address is enough"),
        keywords="trial credit card needed payment details required start",
        questions=(
            "Do I need a credit card for the trial?",
            "Can I start the trial without payment details?",
            "Is a card required to try it?",
            "why do you ask for my card in the trial",
            "trial without card",
            "must I enter a bank card to test quillbox",
            "what information do you need to begin a trial",
        ),
    ),
    Fact(
        id="trial-end",
        topic="trial",
        answer=(
            "When a trial ends without an upgrade, the account drops to the free Reader level and nothing is charged."
        ),
        key_terms=("free Reader level", "nothing is charged"),
        keywords="trial ends after expire upgrade automatic charge",
        questions=(
            "What happens when my trial ends?",
            "Will I be charged after the trial?",
            "Does the trial turn into a paid plan automatically?",
            "trial expired what now",
            "do I have to cancel my trial",
            "after the test period is over what happens",
            "Is my account locked when the trial runs out?",
        ),
    ),
    Fact(
        id="trial-extend",
        topic="trial",
        answer=(
            "A trial can be extended once by 7 days: use the Extend trial button on the banner in its last three days."
        ),
        key_terms=("Extend trial", "7 days"),
        keywords="trial extend longer more time extension",
        questions=(
            "Can I extend my trial?",
            "I need more time to test",
            "My trial is too short, can I get a few extra days?",
            "trial extension",
            "could you prolong the test period",
            "how do I get a longer trial",
            "I had no time to try it, may I have another week?",
        ),
    ),
    Fact(
        id="trial-second",
        topic="trial",
        answer="Each person may have one trial a year; a second trial for the same email is possible after 12 months.",
        key_terms=("one trial a year", "12 months"),
        keywords="second trial again another repeat twice",
        questions=(
            "Can I have a second trial?",
            "I already had a trial, may I try again?",
            "How often can I start a free trial?",
            "trial again same email",
            "is a repeat trial possible",
            "I tested it last year, can I get another trial?",
            "two trials for one person",
        ),
    ),
    Fact(
        id="renewal-auto",
        topic="renewals",
        answer=(
            "Subscriptions renew automatically on the renewal date. Switch off Auto-renew in Settings > Billing "
            "if you do not want that."
        ),
        key_terms=("Auto-renew", "renewal date"),
        keywords="renewal automatic renew auto-renew turn off",
        questions=(
            "Does my subscription renew automatically?",
            "How do I turn off auto renewal?",
            "stop automatic renewal",
            "Will my plan be extended by itself?",
            "I don't want it to renew",
            "where can I disable auto-renew",
            "is this a recurring subscription",
        ),
    ),
    Fact(
        id="renewal-reminder",
        topic="renewals",
        answer="Yearly plans get a reminder email 30 days before renewal; monthly plans get none.",
        key_terms=("reminder email", "30 days before renewal"),
        keywords="renewal reminder notice warn email before",
        questions=(
            "Do you remind me before my plan renews?",
            "Will I get a notice before renewal?",
            "renewal reminder",
            "Is there a warning before the yearly charge?",
            "how far ahead do you tell me about the renewal",
            "do i get an email before you charge me for another year",
        ),
    ),
    Fact(
        id="renewal-price",
        topic="renewals",
        answer=(
            "Your price is fixed for the period you paid for. We announce a price rise 60 days ahead, and it "
            "applies from the next renewal."
        ),
        key_terms=("60 days ahead", "price rise"),
        keywords="price increase rise change announcement more expensive",
        questions=(
            "Can my price go up?",
            "How will I know about a price increase?",
            "Will it get more expensive?",
            "Is my price guaranteed?",
            "price rise notice",
            "why is the price going up",
            "do you raise prices without telling me",
        ),
    ),
    Fact(
        id="pause-schedule",
        topic="pausing",
        answer="You can plan a pause in advance: pick a start date up to 3 months ahead in the pause dialog.",
        key_terms=("start date", "3 months ahead"),
        keywords="schedule pause advance future date plan ahead",
        questions=(
            "Can I schedule a pause for later?",
            "I want to pause starting next month",
            "set a pause in advance",
            "Can a pause begin on a future date?",
            "plan a break ahead of time",
            "I'm travelling in spring, can I arrange the pause now?",
        ),
    ),
)
