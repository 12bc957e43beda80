"""The texts of the page's scripts, for translation. A test compares them with the scripts (static/streamserve/*.js).

The scripts are written in English; the page brings what differs in its language. Texts of the templates are marked
there. `manage.py makemessages` finds both.
"""

from __future__ import annotations

from django.utils.translation import gettext, gettext_noop

WORDS = (
    gettext_noop("Answer complete"),
    gettext_noop("Connection lost. Trying again in {seconds} s."),
    gettext_noop("Connection lost. Trying again…"),
    gettext_noop("Copied"),
    gettext_noop("Copy"),
    gettext_noop("Ended at the length limit"),
    gettext_noop("Ended by a filter"),
    gettext_noop("Ended, because it had no reader"),
    gettext_noop("From the question's arrival at the server to the end"),
    gettext_noop("From sending the question to the first words on this screen, and as the server measured it"),
    gettext_noop("Generating"),
    gettext_noop("Image: {text}"),
    gettext_noop("In the queue"),
    gettext_noop("In the queue, place {place}"),
    gettext_noop("New chat"),
    gettext_noop("Of {count} prompt tokens, taken from the prefix cache"),
    gettext_noop("Press Ctrl+C"),
    gettext_noop("Reading"),
    gettext_noop("Reading, {percent} %"),
    gettext_noop("Something on this page went wrong."),
    gettext_noop("Source {number}: {title}"),
    gettext_noop("Speed after the first token"),
    gettext_noop("Step {step}"),
    gettext_noop("Step {step} of {of}"),
    gettext_noop("Stopped"),
    gettext_noop("The answer could not be finished."),
    gettext_noop("The answer failed"),
    gettext_noop("The answer took too long and was ended."),
    gettext_noop("The budget of this chat"),
    gettext_noop("The model cannot answer."),
    gettext_noop("The model has stopped working. The site's owner can see why in the log."),
    gettext_noop("The model is about to be restarted. New answers wait until it is back."),
    gettext_noop("The model is busy."),
    gettext_noop("The model is loading"),
    gettext_noop("The model is paused. Answers go on when it is resumed."),
    gettext_noop("The page was left before this answer began."),
    gettext_noop("The rest of this answer is no longer kept."),
    gettext_noop("The server answered {status}."),
    gettext_noop("The server could not be reached. Your question is still here."),
    gettext_noop("The server does not answer. Trying again…"),
    gettext_noop("The server is back."),
    gettext_noop("Thinking…"),
    gettext_noop("This answer is no longer kept."),
    gettext_noop("This conversation has grown too long for the model. Start a new chat to go on."),
    gettext_noop("This question is too long for the model. Shorten it and ask again."),
    gettext_noop("Thought"),
    gettext_noop("Thought for {seconds} s"),
    gettext_noop("Tokens of this answer"),
    gettext_noop("Tool call"),
    gettext_noop("Tool result"),
    gettext_noop("Trying again in {seconds} s"),
    gettext_noop("Waiting for the model"),
    gettext_noop("You are offline."),
    gettext_noop("You have reached the limit of answers at a time."),
    gettext_noop("Your session has ended, or you may not ask this model. Reload the page and try again."),
    gettext_noop("Your session has ended. Reload the page and sign in again."),
    gettext_noop("code"),
    gettext_noop("first token {times}"),
    gettext_noop("{count} cached"),
    gettext_noop("{count} token"),
    gettext_noop("{count} tokens"),
    gettext_noop("{loaded} of {total} MB"),
    gettext_noop("{rate} tok/s"),
    gettext_noop("{time} here"),
    gettext_noop("{time} in all"),
    gettext_noop("{time} server"),
)


def translations() -> dict[str, str]:
    """Return the texts that differ from English in the active language."""
    translated = {text: gettext(text) for text in WORDS}
    return {text: other for text, other in translated.items() if other != text}
