"""`billing`: the help desk's assistant, as a pipeline. It answers from the passages, cites them, or does not know.

    retrieve ─► rerank and select ─► trim ─► answer, with the slots filled and the passages cited
    └─ meanwhile: the prefix of the prompt is computed

`HELP_ANSWERS` chooses how: "slots" for a model that cannot copy (the demo's), "quotes" for one that can. With
`HELP_BESIDE_PAGES` the model answers what no passage answers, and the answer is marked so. Registered by
project/pipelines.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

from django.conf import settings

from project.help.answering import Citations, Markers, SlotFiller, allowed_answers
from project.help.languages import Language, languages
from project.help.search import Hit, candidates, choose
from streamserve import Run, Static

MAX_CONTEXT_TOKENS = 3000
MAX_ANSWER_TOKENS = 240
FIRST_TOKEN_SECONDS, TOTAL_SECONDS = 0.5, 5.0  # the budgets that the chat page shows
NO_ANSWER = (
    "Sorry, I could not find that in our help pages. Please write to help@quillbox.example, or press Talk to a human "
    "in this chat."
)
FILES_UNREAD = "This assistant answers from the help pages, and has not read your files."
NOT_FROM_PAGES = "Not from the help pages:"
SYSTEM = Static(
    "You are the help desk of Quillbox. Answer in two or three sentences, from the numbered passages only, and write "
    "the number of each passage that you use in brackets behind the sentence, as [1]. If they do not answer the "
    "question, say that you do not know."
)
SYSTEM_WITHOUT_PAGES = Static(
    "You are the help desk of Quillbox, an online notebook. No help page answers the question. Answer in one or two "
    "sentences from what you know in general. State nothing about Quillbox itself."
)
_ASKED = "\n\nQuestion:"
_MARKER = re.compile(r" ?\[\d{1,2}\]")
_SMALL_TALK = re.compile(
    r"\W*(?:hi|hello|hey|hiya|howdy|good (?:morning|afternoon|evening|day)|greetings|thanks?|thank you|thx|cheers|bye|"
    r"goodbye|see you|ok(?:ay)?|great|who are you|what are you|what can you do|how are you|nice to meet you|"
    r"hallo|guten (?:morgen|tag|abend)|danke|bonjour|bonsoir|salut|merci|hola|buenos días|buenas tardes|gracias|"
    r"こんにちは|ありがとう)(?!\w)",
    re.IGNORECASE,
)


async def billing(run: Run) -> None:
    """Answer a question about Quillbox from its help pages, with its sources."""
    warm(run)
    if run.messages and run.messages[-1].attached:
        await run.say(f"*{FILES_UNREAD}*\n\n")
    found = await run.step("Searching the help pages", candidates, run.question, of=3, phase="retrieval")
    hits = await run.step("Choosing the passages", choose, found, _earlier(run), of=3, phase="rerank")
    language = languages().get(found["language"])
    if hits:
        hits = await trimmed(run, hits)
        await run.step("Writing the answer", partial(answer, run, hits, found["searched"], language), of=3)
    elif is_small_talk(run.question):
        await run.generate(_conversation(run), max_tokens=60, temperature=0)
    elif settings.HELP_BESIDE_PAGES:
        await run.step("Writing the answer", partial(answer_freely, run, language), of=3)
    else:
        await run.say(language.no_answer if language else NO_ANSWER)


async def answer(run: Run, hits: Sequence[Hit], searched: str, language: Language | None = None) -> None:
    """Have the model answer from these passages; show it with its citations. The passages' sentences are English.

    A model that chooses among sentences is asked what was `searched`: the question corrected, and in English.
    """
    citations = Citations(partial(cite, run))
    if settings.HELP_ANSWERS == "slots":
        if language:
            await run.say(f"{language.in_english} ")
        choices = allowed_answers(hits)
        await run.generate(
            [*_conversation(run)[:-1], {"role": "user", "content": searched}],
            grammar={"type": "choice", "choices": choices},
            through=SlotFiller(hits, citations),
            max_tokens=MAX_ANSWER_TOKENS,
            temperature=0,
        )
        return
    passages = "\n\n".join(f"[{number}] {_as_text(hit)}" for number, hit in enumerate(hits, 1))
    asked = {"role": "user", "content": f"{passages}{_ASKED} {run.question}"}
    await run.generate(
        [{"role": "system", "content": SYSTEM}, *_conversation(run)[:-1], asked],
        through=Markers(hits, citations),
        stop=[_ASKED],  # a small model goes on with a question of its own
        max_tokens=MAX_ANSWER_TOKENS,
        temperature=0,
    )
    if not len(citations):  # a model that writes no marks: these passages are what it has read
        for hit in hits:
            cite(run, hit)


async def answer_freely(run: Run, language: Language | None = None) -> None:
    """Have the model answer without a passage, and mark the answer so."""
    await run.say(f"*{language.not_from_pages if language else NOT_FROM_PAGES}* ")
    messages = [{"role": "system", "content": SYSTEM_WITHOUT_PAGES}, *_conversation(run)]
    await run.generate(messages, max_tokens=MAX_ANSWER_TOKENS, temperature=0)


def cite(run: Run, hit: Hit) -> None:
    """Show a passage as a source of the answer."""
    run.cite("help", id=hit["slug"], title=hit["title"], url=hit["url"])


async def trimmed(run: Run, hits: Sequence[Hit]) -> list[Hit]:
    """Return the first passages that fit into the context."""
    kept = await run.trim(list(map(_as_text, hits)), max_tokens=MAX_CONTEXT_TOKENS)
    return list(hits[: len(kept)])


def warm(run: Run) -> None:
    """Have computed, while passages are looked up, what the prompt begins with: all of it where no passage is in it."""
    if settings.HELP_ANSWERS == "slots":
        run.warm(_conversation(run))
    else:
        run.warm([{"role": "system", "content": SYSTEM}, *_conversation(run)[:-1]])


def is_small_talk(question: str) -> bool:
    """Whether a question greets, thanks or asks who answers, and is short."""
    return len(question.split()) <= 6 and _SMALL_TALK.match(question) is not None


def _as_text(hit: Hit) -> str:
    return f"{hit['title']}\n{hit['text']}"


def _earlier(run: Run) -> str:
    """Return the earlier question that the question may lean on; "" for the first, and for a greeting."""
    asked = [message.words for message in run.messages if message.role == "user"]
    return "" if len(asked) < 2 or is_small_talk(run.question) else asked[-2]


def _conversation(run: Run) -> list[dict[str, str]]:
    """Return the last turns of the conversation as the model may see them: without the numbers of sources."""
    turns = [message for message in run.messages if message.role in ("user", "assistant")][-5:]
    if not turns:
        return [{"role": "user", "content": run.question}]
    return [{"role": turn.role, "content": _MARKER.sub("", turn.words)} for turn in turns]
