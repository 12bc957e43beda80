"""Facts about the apps and the API. Data only."""

from project.demo_model.knowledge.fact import Fact

APPS: tuple[Fact, ...] = (
    Fact(
        id="app-platforms",
        topic="apps",
        answer=(
            "There are apps for iPhone, iPad, Android, Windows, macOS and Linux, and Quillbox runs in every "
            "modern browser."
        ),
        key_terms=("Windows, macOS and Linux",),
        keywords="app apps download android iphone windows mac linux platforms",
        questions=(
            "Is there a mobile app?",
            "Which platforms do you support?",
            "Can I install Quillbox on Windows?",
            "android app",
            "does it run on linux",
            "is there something for my ipad",
            "Where can I get the desktop version?",
        ),
    ),
    Fact(
        id="app-offline",
        topic="apps",
        answer="Mark a notebook Available offline in the app; changes sync when you are online again.",
        key_terms=("Available offline",),
        keywords="offline without internet plane sync no connection",
        questions=(
            "Can I work offline?",
            "Does it work without internet?",
            "I am on a plane, can I read my notes?",
            "offline mode",
            "use quillbox with no connection",
            "edit notes when there is no wifi",
        ),
    ),
    Fact(
        id="app-sync",
        topic="apps",
        answer=(
            "If a device does not sync, pull down to refresh, check you are signed in with the same email, and "
            "update the app."
        ),
        key_terms=("pull down to refresh",),
        keywords="sync not working synchronise devices missing changes",
        questions=(
            "My notes do not sync",
            "Changes are missing on my phone",
            "sync problem",
            "My tablet shows old notes",
            "the app and the website show different things",
            "synchronisation is stuck",
        ),
    ),
    Fact(
        id="app-crash",
        topic="apps",
        answer=(
            "If the app crashes, install the latest version, restart the device and send us the report from Help "
            "> Send diagnostics."
        ),
        key_terms=("Send diagnostics",),
        keywords="crash app closes freezes bug error report",
        questions=(
            "The app keeps crashing",
            "Quillbox closes by itself",
            "The app is frozen",
            "it crashes on start",
            "I found a bug",
            "the program hangs all the time",
            "app does not open",
        ),
    ),
    Fact(
        id="app-dark",
        topic="apps",
        answer="Dark mode follows your system; to force it, choose Theme > Dark in the view menu.",
        key_terms=("Theme > Dark",),
        keywords="dark mode theme night black colours light",
        questions=(
            "Is there a dark mode?",
            "How do I switch to dark theme?",
            "The screen is too bright",
            "night mode",
            "black background",
            "change the colours of the app",
        ),
    ),
    Fact(
        id="app-scan",
        topic="apps",
        answer=(
            "Scan a printed page with the camera button in the mobile app; handwriting becomes searchable text "
            "in a minute."
        ),
        key_terms=("camera button", "handwriting"),
        keywords="scan paper page camera handwriting ocr photo",
        questions=(
            "How do I scan a page?",
            "Can I digitise my paper notes?",
            "handwriting recognition",
            "take a picture of my notebook",
            "does it read my handwriting",
            "turn paper into text",
        ),
    ),
    Fact(
        id="api-key",
        topic="API",
        answer="Create an API key under Settings > Developer > New key; it is shown only once.",
        key_terms=("New key", "shown only once"),
        keywords="api key create token developer generate",
        questions=(
            "How do I get an API key?",
            "Where can I create an access token?",
            "api key",
            "Do you have an API?",
            "I am a developer and want to connect my script",
            "generate a token for the api",
        ),
    ),
    Fact(
        id="api-limit",
        topic="API",
        answer="The API allows 60 requests per minute per key; beyond that it answers 429 with a Retry-After header.",
        key_terms=("60 requests per minute", "429"),
        keywords="api rate limit requests minute 429 too many",
        questions=(
            "What is the API rate limit?",
            "I get error 429",
            "How many requests can I make?",
            "too many requests",
            "api throttling",
            "my script is being slowed down by your api",
        ),
    ),
    Fact(
        id="api-limit-raise",
        topic="API",
        answer="Business customers can have the API limit raised to 600 requests per minute by asking support.",
        key_terms=("600 requests per minute",),
        keywords="api limit raise increase higher more requests business",
        questions=(
            "Can the API limit be raised?",
            "We need more API calls",
            "increase api rate limit",
            "60 requests are not enough for us",
            "higher api quota for business customers",
            "lift the api throttle",
        ),
    ),
    Fact(
        id="api-webhook",
        topic="API",
        answer="Webhooks are set under Settings > Developer > Webhooks and are signed with HMAC-SHA256.",
        key_terms=("Webhooks", "HMAC-SHA256"),
        keywords="webhook webhooks callback event signature notify url",
        questions=(
            "Do you support webhooks?",
            "How do I get notified by HTTP when a page changes?",
            "webhook signature",
            "set up a callback url",
            "verify that a webhook comes from you",
            "call my server on events",
        ),
    ),
    Fact(
        id="api-docs",
        topic="API",
        answer="The API reference with examples in Python and JavaScript is at developers.quillbox.example.",
        key_terms=("developers.quillbox.example",),
        keywords="api documentation docs reference examples python javascript",
        questions=(
            "Where is the API documentation?",
            "Are there code examples for the API?",
            "developer docs",
            "how do I read the reference of your api",
            "api manual",
            "which endpoints does the api have",
        ),
    ),
    Fact(
        id="api-key-leak",
        topic="API",
        answer=(
            "If a key has leaked, press Rotate next to it: the old key dies after 24 hours, or at once with Rotate now."
        ),
        key_terms=("press Rotate", "24 hours"),
        keywords="api key leaked rotate revoke exposed stolen",
        questions=(
            "My API key was leaked",
            "How do I rotate a key?",
            "I pushed my token to GitHub",
            "revoke an api key",
            "replace a compromised api token",
            "somebody saw my key",
        ),
    ),
    Fact(
        id="search-notes",
        topic="apps",
        answer="Press Ctrl+K to search all notebooks; put words in quotes for an exact match.",
        key_terms=("Ctrl+K", "exact match"),
        keywords="search find notes text shortcut quotes",
        questions=(
            "How do I search my notes?",
            "I can't find a page",
            "search all notebooks",
            "is there a shortcut for finding things",
            "look for an exact phrase",
            "find text in my notebooks",
        ),
    ),
    Fact(
        id="templates",
        topic="apps",
        answer="Start from one of 80 templates with New > From template, or save a page of your own as a template.",
        key_terms=("80 templates",),
        keywords="templates template layout meeting ready-made start",
        questions=(
            "Do you have templates?",
            "How do I use a template?",
            "ready-made page layouts",
            "meeting notes template",
            "save my page as a template",
            "start a notebook from a sample",
        ),
    ),
)
