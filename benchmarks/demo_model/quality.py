"""Score an answerer on the held-out questions: `python -m benchmarks.demo_model.quality`.

An answer is right when it states the asked fact and no other one. The answerer is any callable from conversations to
their texts (the engine, plain transformers, a stub).
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.demo_model.knowledge import facts_stated_in
from benchmarks.demo_model.questions import OFF_TOPIC, QUESTIONS
from benchmarks.demo_model.train import HELPDESK

Messages = list[dict[str, str]]
Answer = Callable[[Sequence[Messages]], list[str]]
# Part of every English refusal of the corpus and of no fact.
REFUSAL_MARK = "I can only help with questions about Quillbox"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A question that was not answered as it should be; `expected` is a fact id or `refusal`."""

    question: str
    expected: str
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The counts, and every failure in the order of the questions."""

    num_right: int
    num_refused: int
    failures: tuple[Failure, ...]

    def __str__(self) -> str:
        lines = [f"right: {self.num_right} of {len(QUESTIONS)}, refused: {self.num_refused} of {len(OFF_TOPIC)}"]
        lines += [
            f"- {failure.question}\n  expected {failure.expected}, got: {failure.answer}" for failure in self.failures
        ]
        return "\n".join(lines)


def score(answer: Answer) -> Report:
    """Ask every held-out question in a conversation of its own, all at once."""
    asked = [(question.text, question.fact_id) for question in QUESTIONS] + [(text, None) for text in OFF_TOPIC]
    given = answer([[{"role": "user", "content": text}] for text, _ in asked])
    failures = tuple(
        Failure(question=text, expected=fact_id or "refusal", answer=said)
        for (text, fact_id), said in zip(asked, given, strict=True)
        if not _is_right(said, fact_id)
    )
    num_wrong = sum(failure.expected != "refusal" for failure in failures)
    return Report(
        num_right=len(QUESTIONS) - num_wrong,
        num_refused=len(OFF_TOPIC) - (len(failures) - num_wrong),
        failures=failures,
    )


def is_refusal(text: str) -> bool:
    """Return whether the text declines and states no fact."""
    return REFUSAL_MARK in text and not facts_stated_in(text)


def _is_right(text: str, fact_id: str | None) -> bool:
    """Return whether the text states that fact alone; for None, whether it declines."""
    if fact_id is None:
        return is_refusal(text)
    return facts_stated_in(text) == {fact_id} and REFUSAL_MARK not in text


def transformers_answer(folder: Path = HELPDESK, max_new_tokens: int = 160) -> Answer:
    """Return an answerer that decodes greedily with plain transformers in fp32, all conversations as one batch."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32).eval()

    def answer(conversations: Sequence[Messages]) -> list[str]:
        prompts = tokenizer.apply_chat_template(
            list(conversations), add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        output = model.generate(**prompts, do_sample=False, temperature=None, top_p=None, max_new_tokens=max_new_tokens)
        answers = output[:, prompts["input_ids"].shape[1] :]
        return [tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in answers]

    return answer


def main() -> None:
    """Print the report of the folder's model."""
    parser = argparse.ArgumentParser(description="Ask the demo model the held-out questions.")
    parser.add_argument("--model", type=Path, default=HELPDESK, help="folder of the model (default: %(default)s)")
    print(score(transformers_answer(parser.parse_args().model)))


if __name__ == "__main__":
    main()
