"""Facts about plans and what they cost: prices, plan changes, taxes, discounts. Data only."""

from project.demo_model.knowledge.fact import Fact

PLANS: tuple[Fact, ...] = (
    Fact(
        id="price-solo",
        topic="prices",
        answer="The Solo plan costs $8 a month, or $80 a year, for one person.",
        key_terms=("Solo plan", "$80 a year"),
        keywords="solo price cost month single person individual",
        questions=(
            "How much is the Solo plan?",
            "What does Quillbox cost for one person?",
            "price for a single user",
            "solo price",
            "I only need it for myself, what do I pay?",
            "cheapest paid plan",
            "how expensive is the individual plan",
        ),
    ),
    Fact(
        id="price-team",
        topic="prices",
        answer="The Team plan costs $15 per seat a month, with a minimum of two seats.",
        key_terms=("$15 per seat", "minimum of two seats"),
        keywords="team price cost seat per month",
        questions=(
            "How much is the Team plan?",
            "team plan price",
            "What do we pay per person on Team?",
            "price for a small team",
            "cost of the plan for teams",
            "what would five people on Team cost us per head",
        ),
    ),
    Fact(
        id="price-business",
        topic="prices",
        answer="The Business plan costs $29 per seat a month and adds single sign-on, audit logs and priority support.",
        key_terms=("$29 per seat", "audit logs"),
        keywords="business plan price cost seat enterprise company",
        questions=(
            "How much is the Business plan?",
            "What is included in Business?",
            "business plan price",
            "price for a big company",
            "What do you charge for the largest plan?",
            "enterprise pricing",
            "what does the top plan add",
        ),
    ),
    Fact(
        id="price-free",
        topic="prices",
        answer=(
            "Yes, there is a free Reader level: it opens and comments on shared notebooks but cannot create new ones."
        ),
        key_terms=("free Reader level", "comments on shared notebooks"),
        keywords="free plan reader no cost without paying",
        questions=(
            "Is there a free plan?",
            "Can I use Quillbox without paying?",
            "What can I do for free?",
            "free version",
            "is there a no-cost account",
            "what is the Reader level",
            "do you offer a free tier",
        ),
    ),
    Fact(
        id="price-yearly",
        topic="prices",
        answer="Paying yearly gives you two months free compared with monthly billing.",
        key_terms=("two months free",),
        keywords="yearly annual monthly saving cheaper billing",
        questions=(
            "Is yearly billing cheaper?",
            "How much do I save with an annual plan?",
            "What's the difference between monthly and yearly?",
            "annual saving",
            "do I get something off if I pay for a whole year",
            "should I pay per month or per year",
        ),
    ),
    Fact(
        id="plan-compare",
        topic="prices",
        answer=(
            "The plans side by side: Solo is for one person, Team adds shared notebooks, Business adds security "
            "controls. The Compare plans page lists every difference."
        ),
        key_terms=("Compare plans page",),
        keywords="compare plans difference solo team business which choose",
        questions=(
            "What is the difference between the plans?",
            "Which plan should I choose?",
            "Compare Solo and Team",
            "Which plans are there?",
            "help me pick a plan",
            "what do I get with each plan",
            "overview of your plans",
            "which subscription is right for me",
        ),
    ),
    Fact(
        id="upgrade-how",
        topic="plan changes",
        answer=(
            "To upgrade, choose a bigger plan in Settings > Billing > Change plan. It starts at once, and you "
            "pay only the difference for the rest of the period."
        ),
        key_terms=("choose a bigger plan", "only the difference"),
        keywords="upgrade bigger plan change switch higher team business",
        questions=(
            "How do I upgrade my plan?",
            "I want to move to a bigger plan",
            "Switch from Solo to Team",
            "upgrade to business",
            "Do I pay the full price when I upgrade?",
            "how to get a higher plan",
            "When does an upgrade start?",
            "we need more features, how do we move up",
        ),
    ),
    Fact(
        id="downgrade-how",
        topic="plan changes",
        answer=(
            "To downgrade, choose a smaller plan in Settings > Billing > Change plan. It takes effect at the "
            "next renewal, and until then you keep everything."
        ),
        key_terms=("choose a smaller plan", "next renewal"),
        keywords="downgrade smaller plan cheaper lower switch change",
        questions=(
            "How do I downgrade?",
            "I want a cheaper plan",
            "Switch from Business to Team",
            "move to a smaller plan",
            "When does a downgrade take effect?",
            "go back to solo",
            "my plan is too big for me, can i reduce it",
            "lower my subscription level",
        ),
    ),
    Fact(
        id="switch-yearly",
        topic="plan changes",
        answer=(
            "To go from monthly to yearly, turn on Yearly billing under Change plan; days already paid are credited."
        ),
        key_terms=("Yearly billing", "credited"),
        keywords="switch monthly yearly annual billing change interval",
        questions=(
            "How do I switch to yearly billing?",
            "Change from monthly to annual",
            "I want to pay once a year",
            "switch billing interval",
            "can i move from paying each month to paying per year",
            "turn my monthly plan into a yearly one",
        ),
    ),
    Fact(
        id="switch-monthly",
        topic="plan changes",
        answer="To go from yearly to monthly, turn off Yearly billing; the change happens when the paid year ends.",
        key_terms=("yearly to monthly", "paid year ends"),
        keywords="switch yearly monthly change back interval",
        questions=(
            "How do I switch to monthly billing?",
            "Change from annual to monthly",
            "I'd rather pay every month",
            "can I leave the yearly plan for a monthly one",
            "switch back to month by month",
            "stop paying yearly, pay monthly instead",
        ),
    ),
    Fact(
        id="downgrade-data",
        topic="plan changes",
        answer=(
            "Nothing is deleted by a downgrade: notebooks above the new limit become read-only until you remove some."
        ),
        key_terms=("Nothing is deleted by a downgrade", "above the new limit"),
        keywords="downgrade data lose notebooks over limit deleted",
        questions=(
            "Will I lose data if I downgrade?",
            "What happens to my notebooks on a smaller plan?",
            "I have more notebooks than the cheaper plan allows",
            "downgrade data loss",
            "Do you delete things when I move to a lower plan?",
            "over the limit after downgrading",
        ),
    ),
    Fact(
        id="plan-proration",
        topic="plan changes",
        answer=(
            "When something changes mid-period we prorate by day, and the invoice shows the credit and the new "
            "charge on separate lines."
        ),
        key_terms=("prorate by day", "separate lines"),
        keywords="prorate proration credit mid period calculation invoice odd amount",
        questions=(
            "How is proration calculated?",
            "Why is there a credit on my invoice?",
            "What is this odd amount on my bill?",
            "proration",
            "how do you work out the price when I change in the middle of the month",
            "Explain the credit line on my bill",
        ),
    ),
    Fact(
        id="tax-vat",
        topic="taxes",
        answer="Prices are shown without tax; VAT or sales tax is added at checkout according to your billing country.",
        key_terms=("without tax", "billing country"),
        keywords="vat sales tax included prices added checkout",
        questions=(
            "Do your prices include VAT?",
            "Why is tax added to my bill?",
            "Is sales tax included?",
            "how much tax do I pay",
            "the amount is higher than advertised because of tax",
            "are prices net or gross",
            "tax at checkout",
        ),
    ),
    Fact(
        id="tax-vat-id",
        topic="taxes",
        answer=(
            "Enter your VAT ID under Billing details > Tax ID; once it is validated, EU companies are invoiced "
            "with reverse charge."
        ),
        key_terms=("Tax ID", "reverse charge"),
        keywords="vat id number enter tax id reverse charge eu company",
        questions=(
            "Where do I enter my VAT number?",
            "Add our VAT ID",
            "Do you support reverse charge?",
            "How do EU companies avoid paying VAT?",
            "tax id",
            "we are a business in Germany and have a VAT number",
            "our tax number is missing on the invoice",
        ),
    ),
    Fact(
        id="tax-exempt",
        topic="taxes",
        answer=(
            "Tax-exempt organisations upload their certificate under Tax exemption; we review it within 3 "
            "business days."
        ),
        key_terms=("certificate", "3 business days"),
        keywords="tax exempt exemption certificate charity nonprofit school",
        questions=(
            "We are tax exempt, what do we do?",
            "How do I submit a tax exemption certificate?",
            "Our charity does not pay sales tax",
            "tax exemption",
            "remove the tax, we are an exempt organisation",
            "where can a school upload its exemption form",
        ),
    ),
    Fact(
        id="tax-past",
        topic="taxes",
        answer=(
            "VAT already charged before your ID was added can be returned for the last 60 days: ask for a "
            "corrected invoice."
        ),
        key_terms=("last 60 days", "corrected invoice"),
        keywords="vat refund past already paid back corrected invoice tax",
        questions=(
            "Can I get VAT back that I already paid?",
            "I forgot to add my VAT ID, can you refund the tax?",
            "vat refund",
            "You charged us tax before we entered our number",
            "reclaim tax from an earlier invoice",
            "correct the tax on last month's bill",
        ),
    ),
    Fact(
        id="discount-student",
        topic="discounts",
        answer="Students and teachers get 50% off the Solo plan with a valid school email address.",
        key_terms=("50% off", "school email"),
        keywords="student teacher discount education school university",
        questions=(
            "Do you have a student discount?",
            "I am a teacher, is it cheaper for me?",
            "education discount",
            "discount for university students",
            "I study and have little money, any reduction?",
            "price for pupils and schools",
        ),
    ),
    Fact(
        id="discount-nonprofit",
        topic="discounts",
        answer="Registered nonprofits get 30% off every plan; send proof of status through the Nonprofit form.",
        key_terms=("30% off", "Nonprofit form"),
        keywords="nonprofit charity discount ngo reduced price",
        questions=(
            "Is there a nonprofit discount?",
            "We are a charity, do we get a reduced price?",
            "NGO pricing",
            "discount for non-profit organisations",
            "our association is registered as a charity, cheaper rates?",
            "special price for charities",
        ),
    ),
    Fact(
        id="discount-code",
        topic="discounts",
        answer=(
            "Type a promo code into the Have a code? box at checkout; codes cannot be added to an order already paid."
        ),
        key_terms=("Have a code?", "already paid"),
        keywords="promo code coupon voucher discount enter apply",
        questions=(
            "Where do I enter a promo code?",
            "I have a coupon",
            "How do I use a discount code?",
            "apply voucher code",
            "I forgot to enter my code before paying",
            "my coupon code box is missing",
        ),
    ),
    Fact(
        id="discount-code-fails",
        topic="discounts",
        answer="A code is refused when it has expired, was used before, or is meant for new customers only.",
        key_terms=("new customers only", "used before"),
        keywords="promo code not working invalid refused rejected coupon",
        questions=(
            "My promo code does not work",
            "Why is my coupon invalid?",
            "The discount code was rejected",
            "code not accepted",
            "It says my voucher code is not valid",
            "coupon error at checkout",
        ),
    ),
    Fact(
        id="discount-referral",
        topic="discounts",
        answer="Invite a friend with your referral link: when they buy a plan you both receive a $10 credit.",
        key_terms=("referral link", "$10 credit"),
        keywords="referral invite friend credit bonus recommend reward",
        questions=(
            "Do you have a referral program?",
            "What do I get if I invite a friend?",
            "I recommended you to a colleague, is there a reward?",
            "referral bonus",
            "earn credit by telling others",
            "refer a friend",
        ),
    ),
)
