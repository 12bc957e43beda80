"""The knowledge base of Quillbox, a fictional notebook service with a help desk.

Every fact is fixed and made up. This package is data and one lookup; it does not know who asks (the corpus
generator, a retriever, a page with citations) or how an answer is worded.
"""

from project.demo_model.knowledge.account import ACCOUNT
from project.demo_model.knowledge.apps import APPS
from project.demo_model.knowledge.contact import CONTACT
from project.demo_model.knowledge.content import CONTENT
from project.demo_model.knowledge.deliveries import DELIVERIES
from project.demo_model.knowledge.fact import Fact
from project.demo_model.knowledge.payments import PAYMENTS
from project.demo_model.knowledge.plans import PLANS
from project.demo_model.knowledge.subscription import SUBSCRIPTION
from project.demo_model.knowledge.team import TEAM

__all__ = ["FACTS", "FACTS_BY_ID", "Fact", "facts_stated_in"]

FACTS: tuple[Fact, ...] = SUBSCRIPTION + PAYMENTS + PLANS + ACCOUNT + TEAM + CONTENT + APPS + DELIVERIES + CONTACT
FACTS_BY_ID: dict[str, Fact] = {fact.id: fact for fact in FACTS}


def facts_stated_in(text: str) -> frozenset[str]:
    """Return the ids of every fact that `text` states."""
    return frozenset(fact.id for fact in FACTS if fact.is_stated_in(text))
