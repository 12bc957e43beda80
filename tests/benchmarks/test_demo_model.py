"""The demo model's laws: one corpus, held-out questions, a folder any loader reads, and the score."""

import json
import re
from itertools import islice
from random import Random

import pytest

from benchmarks.demo_model.batches import groups
from benchmarks.demo_model.corpus import Example, corpus_sha256, examples
from benchmarks.demo_model.distraction import distract
from benchmarks.demo_model.knowledge import FACTS, FACTS_BY_ID, facts_stated_in
from benchmarks.demo_model.phrases import ASKED, ASPECTS, SITUATIONS
from benchmarks.demo_model.quality import HELPDESK, REFUSAL_MARK, Answer, score, transformers_answer
from benchmarks.demo_model.questions import OFF_TOPIC, QUESTIONS

pytestmark = pytest.mark.proof

pytest.importorskip("transformers", reason="needs the engine extra: pip install '.[engine]'")

MAX_FOLDER_BYTES = 12 * 1024 * 1024
TRICKY_TEXTS = (
    "👩‍💻 👨‍👩‍👧‍👦 🏳️‍🌈 🧑🏾‍🚀 ❤️‍🔥",
    "返金は30日以内です。取消订阅？",
    "नमस्ते! كيف ألغي اشتراكي؟ Привет",
    "  two  spaces\n\ttabs, é vs é, \x00 and \U0010ffff",
)


@pytest.fixture(scope="module")
def corpus() -> list[Example]:
    """The whole corpus, generated once for this file."""
    return list(examples())


@pytest.fixture(scope="module")
def tokenizer():
    """The shipped tokenizer, as users load it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(HELPDESK, local_files_only=True)


def five_grams(text: str) -> set[tuple[str, ...]]:
    """Every run of five lowercased words."""
    words = re.findall(r"[\w']+", text.lower())
    return {tuple(words[at : at + 5]) for at in range(len(words) - 4)}


# Knowledge


def test_there_are_at_least_120_facts_with_ids_of_their_own() -> None:
    """Ids are unique, and every fact has questions, keywords, situations and aspects."""
    assert len(FACTS) == len(FACTS_BY_ID) >= 120
    assert all(len(fact.questions) >= 5 and len(fact.keywords.split()) >= 5 for fact in FACTS)
    assert SITUATIONS.keys() == ASKED.keys() == FACTS_BY_ID.keys()
    assert {aspect for asked in ASKED.values() for aspect in asked} == ASPECTS.keys()


def test_an_answer_states_its_own_fact_and_no_other() -> None:
    """Key terms differ between all facts, so a right answer cannot count for two."""
    assert {fact.id: facts_stated_in(fact.answer) for fact in FACTS} == {fact.id: {fact.id} for fact in FACTS}


@pytest.mark.parametrize(
    "text", ["in full within 130 days of purchase", "$80 a yearly Solo plan", "within 2.30 days of purchase in full"]
)
def test_a_key_term_inside_a_longer_word_or_number_does_not_count(text: str) -> None:
    """`30 days` is not in `130 days`."""
    assert facts_stated_in(text) == frozenset()


# Corpus


def test_the_corpus_is_the_one_the_model_was_trained_on(corpus: list[Example]) -> None:
    """This run of the generator and the one that trained the shipped model agree on the sha256."""
    assert corpus_sha256(corpus) == json.loads((HELPDESK / "training.json").read_text())["corpus_sha256"]


def test_the_corpus_is_the_same_on_every_run(corpus: list[Example]) -> None:
    """A second run in the same process gives the same examples, however many are drawn."""
    assert list(examples(num_examples=5_000)) == corpus[:5_000]


def test_no_held_out_question_shares_five_words_with_the_corpus(corpus: list[Example]) -> None:
    """No run of five words of any held-out question occurs in any message."""
    held_out = set().union(*(five_grams(text) for text in (*(question.text for question in QUESTIONS), *OFF_TOPIC)))
    messages = {message["content"] for example in corpus for message in example.messages}
    assert set().union(*(held_out & five_grams(text) for text in messages)) == set()


@pytest.mark.parametrize(("kind", "least"), [("refusal", 0.10), ("lookup", 0.05), ("small_talk", 0.05)])
def test_rare_kinds_have_their_share(corpus: list[Example], kind: str, least: float) -> None:
    """Refusals, tool calls and greetings are each frequent enough to be learned."""
    assert sum(example.kind == kind for example in corpus) >= least * len(corpus)


def test_every_fact_is_asked_in_many_wordings(corpus: list[Example]) -> None:
    """Each fact has at least twenty different questions."""
    asked: dict[str, set[str]] = {fact.answer: set() for fact in FACTS}
    for example in corpus:
        for question, answered in zip(example.messages, example.messages[1:], strict=False):
            if answered["content"] in asked:
                asked[answered["content"]].add(question["content"])
    assert min(len(questions) for questions in asked.values()) >= 20


def test_conversations_alternate_and_end_with_the_assistant(corpus: list[Example]) -> None:
    """A system prompt comes first or not at all, and the assistant has the last turn."""
    for example in corpus:
        roles = [message["role"] for message in example.messages]
        assert "system" not in roles[1:]
        assert roles[-1] == "assistant"
        assert roles[1:2] != ["assistant"] or roles[0] == "user"


# What training does to the examples


def test_cut_answers_are_beginnings_and_come_late() -> None:
    """Early on every row is whole; later about half of the single answers lack their end, and longer talks never do."""
    single, talk = [1, 2, *range(10, 40)], [1, 2, *range(50, 70), 2, *range(70, 90)]
    encoded = [
        (single, [False, False] + [True] * 30),
        (talk, [False, False] + [True] * 20 + [False] + [True] * 20),
    ] * 1024
    rows = [row for group in islice(groups(encoded, seed=1, batch_tokens=1024), 2_000) for row in group]
    assert all(token_ids in (single, talk) for token_ids, _ in rows[:24_576])
    late = [row for row in rows[24_576:] if row[0] != talk]
    cut = [row for row in late if row[0] != single]
    assert all(row == (single[:14], [False, False] + [True] * 12) for row in cut)
    assert 0.4 < len(cut) / len(late) < 0.6


def test_noise_changes_questions_alone() -> None:
    """Tokens are added and removed between the user's mark and the end; the system prompt and the answer stay."""
    user, end = 3, 2
    before, after = [1, 4, 20, 21, end, user], [end, 5, 40, 41, end]
    question = list(range(100, 130))
    row = (before + question + after, [False] * (len(before) + len(question) + 2) + [True] * 3)
    noisy = [distract(Random(seed), row, user_id=user, end_id=end, text_ids=range(200, 300)) for seed in range(50)]
    for token_ids, is_learned in noisy:
        assert token_ids[:6] == before
        assert token_ids[-5:] == after
        assert [token_id for token_id, learned in zip(token_ids, is_learned, strict=True) if learned] == [40, 41, end]
    assert 10 < sum(one != row for one in noisy) < 40


# The folder


def test_the_folder_is_small_and_complete() -> None:
    """At most 12 MB, and all files that a loader needs."""
    files = {path.name: path.stat().st_size for path in HELPDESK.iterdir()}
    assert sum(files.values()) <= MAX_FOLDER_BYTES
    assert files.keys() >= {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
        "chat_template.jinja", "training.json",
    }  # fmt: skip


@pytest.mark.parametrize("text", TRICKY_TEXTS)
def test_the_tokenizer_gives_every_text_back(tokenizer, text: str) -> None:
    """Encoding and decoding loses no byte."""
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_some_tokens_split_code_points(tokenizer) -> None:
    """At least one token of an emoji sequence is not text by itself, so a detokenizer has to wait for the next."""
    token_ids = tokenizer.encode(TRICKY_TEXTS[0], add_special_tokens=False)
    assert any("�" in tokenizer.decode([token_id]) for token_id in token_ids)


def test_thoughts_and_tool_calls_survive_skipping_special_tokens(tokenizer) -> None:
    """The markers of thoughts and tool calls are single tokens, but not special ones."""
    text = '<think>yes</think>\n<tool_call>{"name": "lookup_account"}</tool_call>'
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(token_ids, skip_special_tokens=True) == text
    assert tokenizer.convert_tokens_to_ids("<think>") in token_ids


def render(tokenizer, messages: list[dict], **options: object) -> str:
    """The prompt as text."""
    return tokenizer.apply_chat_template(messages, tokenize=False, **options)


def test_the_chat_template_marks_every_role(tokenizer) -> None:
    """System, user, assistant and tool have their tokens, and the assistant's turn is opened on request."""
    messages = [{"role": role, "content": role.upper()} for role in ("system", "user", "assistant", "tool")]
    text = "<|bos|><|system|>SYSTEM<|end|><|user|>USER<|end|><|assistant|>ASSISTANT<|end|><|tool|>TOOL<|end|>"
    assert render(tokenizer, messages) == text
    assert render(tokenizer, messages, add_generation_prompt=True) == text + "<|assistant|>"


def test_the_chat_template_takes_what_openai_clients_send(tokenizer) -> None:
    """Developer messages, content in parts, and tool calls with arguments as a string or an object."""
    call = {"name": "lookup_account", "arguments": '{"field": "plan"}'}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be short."}]},
        {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": call}]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": call | {"arguments": {"field": "plan"}}}]},
    ]
    turn = '<|assistant|><tool_call>{"name": "lookup_account", "arguments": {"field": "plan"}}</tool_call><|end|>'
    assert render(tokenizer, messages) == "<|bos|><|system|>Be short.<|end|>" + turn + turn


@pytest.mark.parametrize("has_system", [True, False])
def test_thinking_is_switched_on_by_the_template(tokenizer, has_system: bool) -> None:
    """`enable_thinking` adds the request the model was trained with."""
    messages = [{"role": "system", "content": "Be short."}] * has_system + [{"role": "user", "content": "Hi"}]
    asked = "Be short.\nThink before you answer." if has_system else "Think before you answer."
    assert render(tokenizer, messages, enable_thinking=True) == f"<|bos|><|system|>{asked}<|end|><|user|>Hi<|end|>"
    assert "Think" not in render(tokenizer, messages)


def test_the_chat_template_gives_the_tokens_of_training(tokenizer, corpus: list[Example]) -> None:
    """The prompt a user sends is encoded as the examples were."""
    from benchmarks.demo_model.tokens import encode_example

    for example in corpus[:200]:
        asked = tokenizer.apply_chat_template(example.messages, return_dict=True)["input_ids"]
        assert asked == encode_example(tokenizer.backend_tokenizer, example)[0]


def test_the_model_has_the_promised_shape() -> None:
    """Llama, 3 to 5 million parameters, a context of 1024 or more, ends at `<|end|>`."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(HELPDESK, local_files_only=True)
    assert model.config.model_type == "llama"
    assert 3_000_000 <= model.num_parameters() <= 5_000_000
    assert model.config.max_position_embeddings >= 1024
    assert GenerationConfig.from_pretrained(HELPDESK).eos_token_id == model.config.eos_token_id is not None


# The score


@pytest.mark.parametrize(
    "constant", ["", FACTS[0].answer, f"{REFUSAL_MARK}.", " ".join(fact.answer for fact in FACTS[:20])]
)
def test_a_constant_answer_scores_next_to_nothing(constant: str) -> None:
    """Neither silence, one fact, refusing all, nor stating many facts at once passes."""
    report = score(lambda asked: [constant] * len(asked))
    assert report.num_right < 5
    assert report.num_right + report.num_refused + len(report.failures) == len(QUESTIONS) + len(OFF_TOPIC)


def test_the_right_answers_score_full_marks() -> None:
    """An answerer that knows the fact ids gets everything."""
    answers = {question.text: FACTS_BY_ID[question.fact_id].answer for question in QUESTIONS}
    refusal = f"Sorry, {REFUSAL_MARK}."
    report = score(lambda asked: [answers.get(messages[-1]["content"], refusal) for messages in asked])
    assert (report.num_right, report.num_refused, report.failures) == (len(QUESTIONS), len(OFF_TOPIC), ())


@pytest.fixture(scope="module")
def answer() -> Answer:
    """Greedy decoding of the shipped model by plain transformers; the longest single answer has fewer tokens."""
    return transformers_answer(max_new_tokens=80)


def test_the_model_knows_its_help_desk(answer: Answer) -> None:
    """Greedy, it answers at least 28 of 40 unseen questions and declines at least 9 of 10 off-topic ones."""
    report = score(answer)
    assert report.num_right >= 28, str(report)
    assert report.num_refused >= 9, str(report)


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("Hello", r"help you|like to know"),
        (
            "What plan am I on?",
            r'^<tool_call>\{"name": "lookup_account", "arguments": \{"field": "plan"\}\}</tool_call>$',
        ),
        ("こんにちは", "ご用件をどうぞ"),
    ],
)
def test_the_model_has_its_other_manners(answer: Answer, question: str, expected: str) -> None:
    """A greeting, a tool call and another script come out as trained."""
    [text] = answer([[{"role": "user", "content": question}]])
    assert re.search(expected, text)


@pytest.fixture(scope="module")
def thoughtful(answer: Answer) -> dict[str, str]:
    """Return its answers to ten facts, spread over all topics, asked with "Think first."."""
    facts = FACTS[::15]
    texts = answer([[{"role": "user", "content": f"Think first. {fact.questions[0]}"}] for fact in facts])
    return {fact.id: text for fact, text in zip(facts, texts, strict=True)}


def test_the_model_thinks_when_asked_to(thoughtful: dict[str, str]) -> None:
    """A thought precedes every answer."""
    assert [text for text in thoughtful.values() if not re.match(r"<think>[^<]+</think>\n\S", text)] == []


@pytest.mark.xfail(
    strict=True, reason="needs a demo model that thinks better: the shipped one is right in 5 of 10, see its README"
)
def test_the_answer_after_a_thought_is_right(thoughtful: dict[str, str]) -> None:
    """At least eight of ten answers after a thought state the right fact."""
    assert sum(facts_stated_in(text) == {fact_id} for fact_id, text in thoughtful.items()) >= 8
