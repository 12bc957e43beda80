"""Score an answerer on the held-out questions: `python -m benchmarks.demo_model.quality`.

An answer is right when it states the asked fact and no other one. The answerer is any callable from messages to text
(the engine, plain transformers, a stub).
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.demo_model.knowledge import facts_stated_in
from benchmarks.demo_model.questions import OFF_TOPIC, QUESTIONS
from benchmarks.demo_model.train import HELPDESK

Messages = list[dict[str, str]]
Answer = Callable[[Messages], str]
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
    """Ask every held-out question in a conversation of its own."""
    asked = [(question.text, question.fact_id) for question in QUESTIONS]
    wrong = [failure for text, fact_id in asked if (failure := _failure(answer, text, fact_id))]
    kept = [failure for text in OFF_TOPIC if (failure := _failure(answer, text, None))]
    return Report(
        num_right=len(QUESTIONS) - len(wrong), num_refused=len(OFF_TOPIC) - len(kept), failures=(*wrong, *kept)
    )


def is_refusal(text: str) -> bool:
    """Return whether the text declines and states no fact."""
    return REFUSAL_MARK in text and not facts_stated_in(text)


def _failure(answer: Answer, text: str, fact_id: str | None) -> Failure | None:
    given = answer([{"role": "user", "content": text}])
    is_right = (
        is_refusal(given) if fact_id is None else facts_stated_in(given) == {fact_id} and REFUSAL_MARK not in given
    )
    return None if is_right else Failure(question=text, expected=fact_id or "refusal", answer=given)


def transformers_answer(folder: Path = HELPDESK, max_new_tokens: int = 160) -> Answer:
    """Return an answerer that decodes greedily with plain transformers in fp32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32).eval()

    def answer(messages: Messages) -> str:
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = model.generate(**prompt, do_sample=False, temperature=None, top_p=None, max_new_tokens=max_new_tokens)
        text: str = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
        return text.strip()

    return answer


def main() -> None:
    """Print the report of the folder's model."""
    parser = argparse.ArgumentParser(description="Ask the demo model the held-out questions.")
    parser.add_argument("--model", type=Path, default=HELPDESK, help="folder of the model (default: %(default)s)")
    print(score(transformers_answer(parser.parse_args().model)))


if __name__ == "__main__":
    main()
