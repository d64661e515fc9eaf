import json
import sys
import types
from dataclasses import fields
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from exgrpo.train.common.errors import DataError
from exgrpo.train.data.files import read_rows
from exgrpo.train.data.prompts import PROMPTS, PromptFormat
from exgrpo.train.data.questions import Question, QuestionSet, question_set
from exgrpo.train.reward.contract import ALL_COLUMNS
from tests.train.configs import configured
from tests.train.files import write_rows

SHARED_DATA = Path(__file__).parents[4] / "shared" / "data"

CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer(chat_template=CHAT_TEMPLATE):
    """One token per byte, and a start-of-text token that the tokenizer puts before plain text."""
    vocabulary = {"<s>": 0} | {byte: 1 + i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")
    tokenizer.chat_template = chat_template
    return tokenizer


TOKENIZER = make_tokenizer()
BASE_TOKENIZER = make_tokenizer(None)

TURNS = (("system", "Think first."), ("user", "An example?"), ("assistant", "Yes."), ("user", "What is 6 * 7?"))
PAPER_ROW = {"data_source": "olympiad", "prompt": [{"role": role, "content": text} for role, text in TURNS]}
PAPER_ROW |= {"ability": "math", "reward_model": {"ground_truth": "42", "style": "rule"}}
PAPER_ROW |= {"extra_info": {"index": 0, "split": "default"}}


def load(source, tokenizer, **options):
    """The questions of a source; options of the prompts' format are told from the others by their names."""
    of_format = {field.name: options.pop(field.name) for field in fields(PromptFormat) if field.name in options}
    reading = {name: options.pop(name) for name in ("split", "seed") if name in options}
    rows = read_rows(source, **reading, limit=options.get("limit"), columns=ALL_COLUMNS)
    return question_set(source, rows, tokenizer, PromptFormat(**of_format), **options)


def decoded(question):
    return TOKENIZER.decode(question.prompt, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("suffix", ["jsonl", "json", "lines.json", "parquet"])
def test_the_same_rows_from_every_kind_of_file(tmp_path, suffix):
    rows = [PAPER_ROW, PAPER_ROW | {"reward_model": {"ground_truth": "\\frac12", "style": "rule"}}]
    path = tmp_path / f"mine.{suffix}"
    path.write_text(json.dumps(rows, indent=1)) if suffix == "json" else write_rows(path, rows)
    loaded = load(str(path), TOKENIZER, max_prompt_tokens=100)
    assert [(q.index, q.text, q.gold, q.source) for q in loaded] == [
        (0, "What is 6 * 7?", "42", "olympiad"),
        (1, "What is 6 * 7?", "\\frac12", "olympiad"),
    ]
    assert decoded(loaded[0]) == "<user>What is 6 * 7?\n<assistant>"


def test_malformed_rows_are_reported_together_with_file_and_line(tmp_path):
    path = tmp_path / "mine.jsonl"
    good = json.dumps({"question": "q", "answer": "1"})
    path.write_text("\n".join([good, "", '{"question": "q', *["[]"] * 6, good, '{"question": "cut off", "ans']))
    with pytest.raises(ValueError, match="8 of 10 rows are malformed") as caught:
        load(str(path), TOKENIZER, max_prompt_tokens=100)
    lines = str(caught.value).split("\n")
    assert lines[1].strip().startswith(f"{path} line 3: not valid JSON: Unterminated string")
    assert lines[2].strip() == f"{path} line 4: expected an object, got a list of 0"
    assert len(lines) == 7
    assert lines[-1].strip() == "and 3 more"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", "the data set is empty"),
        ("a.jsonl", b"\n \n", "the data set is empty"),
        ("a.json", b"[]", "the data set is empty"),
        ("a.json", b'{\n"data": []\n}', r"1 of 1 rows are malformed:\n.* its keys are data"),
        ("a.json", b'[{"question": "q"', "not valid JSON"),
        ("a.jsonl", b'{"question": "q", "answer": "1"}\n{"question": "\xff"}', "line 2 is not UTF-8"),
        ("a.parquet", b"PAR1 rubbish", "cannot be read as parquet"),
        ("a.parquet", b"", "cannot be read as parquet"),
        ("a.txt", b"question,answer", "unknown kind of file; known are .jsonl, .json, .parquet, .csv"),
        ("a.csv", b"", "the data set is empty"),
        ("a.csv", b"question,answer\n", "the data set is empty"),
        ("a.csv", b"Frage;Antwort\nq;1\n", "has none of the columns .* it has Frage, Antwort: --data.columns"),
        ("a.csv", b'"question,answer\nq,1\n', "the line of its columns is not valid CSV"),
        ("a.csv", b"question,answer\nq,\xff\n", "line 2 is not UTF-8"),
        ("a.csv", b"question,answer,question\nq,1,p\n", "has more than one column 'question'"),
        ("a.jsonl", b"[" * 100_000, "1 of 1 rows are malformed:\n.*line 1: not valid JSON: it is nested"),
        ("a.json", b"[" * 100_000, "not valid JSON: it is nested too deeply"),
        ("a.jsonl", b'{"question": "q", "answer": ' + b"9" * 5000 + b"}", "1 of 1 rows are malformed:\n.*line 1: not"),
        ("a.jsonl", b'{"question": "\\ud800", "answer": "1"}', "1 of 1 rows are malformed:\n.*JSON: .* half of a surr"),
    ],
)
def test_unreadable_files_are_named(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name}: .*{message}"):
        load(str(path), TOKENIZER, max_prompt_tokens=100)


def test_malformed_rows_of_parquet_are_numbered(tmp_path):
    path = tmp_path / "mine.parquet"
    pq.write_table(pa.table({"question": ["a", None], "answer": ["1", "2"]}), path)
    with pytest.raises(ValueError, match=r"mine.parquet row 2: has none of prompt, question, problem"):
        load(str(path), TOKENIZER, max_prompt_tokens=100)


HALF_TEXTS = [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xc3")]


@pytest.mark.parametrize(
    "column",
    [
        pa.array([b"\xff\xfe", b"q"]),
        pa.array([1.5, float("nan")]),
        pa.nulls(2),
        pa.array([["a"], ["b", "c"]]),
        pa.array([{"a": 1}, {"b": 2}]),
        pa.array([1, 2**62], pa.timestamp("ns")),
        pa.array([2**31 - 1, 0], pa.date32()),
        pa.array([None, None], pa.decimal128(38, 10)),
        pa.Array.from_buffers(pa.string(), 2, HALF_TEXTS),
    ],
    ids=lambda column: str(column.type),
)
def test_columns_that_hold_no_questions_and_tables_that_are_cut_are_named(tmp_path, column):
    path = tmp_path / "mine.parquet"
    pq.write_table(pa.table({"question": column, "answer": ["1", "2"]}), path)
    with pytest.raises(DataError, match="mine.parquet"):
        load(str(path), TOKENIZER, max_prompt_tokens=100)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"mine.parquet: .*cannot be read as parquet"):
        load(str(path), TOKENIZER, max_prompt_tokens=100)


@pytest.mark.parametrize("source", ["missing.jsonl", "/no/such/place", "some/deep/folder", "data/*.parquet", "./here"])
def test_missing_files_are_no_hub_names(source, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match="no such file|matches this pattern"):
        load(source, TOKENIZER, max_prompt_tokens=100)


def test_a_folder_is_an_error_and_a_pattern_is_read_in_order(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "c.txt"):
        write_rows(tmp_path / name, [{"question": name, "answer": "1"}])
    with pytest.raises(ValueError, match="is a folder"):
        load(str(tmp_path), TOKENIZER, max_prompt_tokens=100)
    loaded = load(f"{tmp_path}/*", TOKENIZER, max_prompt_tokens=100)
    assert [(q.index, q.text, q.source) for q in loaded] == [(0, "a.jsonl", "a"), (1, "b.jsonl", "b")]


def test_hub_names_go_to_datasets(monkeypatch):
    calls = []

    def load_dataset(name, config, *, split):
        calls.append((name, config, split))
        if name == "owner/gone":
            raise ConnectionError("cannot be reached\nmore")
        if config is None:
            raise ValueError("Config name is missing.\nPlease pick one among the available configs: ['main']\nmore")
        return [{"question": "q", "answer": "#### 1"}]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    loaded = load("owner/name:main", TOKENIZER, split="test", max_prompt_tokens=100)
    assert calls == [("owner/name", "main", "test")]
    assert (loaded[0].gold, loaded[0].source) == ("1", "owner/name:main")
    with pytest.raises(ValueError, match=r"owner/gone is no file here, .*ConnectionError: cannot be reached$"):
        load("owner/gone", TOKENIZER, max_prompt_tokens=100)
    with pytest.raises(ValueError, match=r"configs: \['main'\]: owner/name:CONFIG names one$"):
        load("owner/name", TOKENIZER, max_prompt_tokens=100)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pip install exgrpo\[train\]"):
        load("owner/name", TOKENIZER, max_prompt_tokens=100)


def test_builtin_problems_need_a_limit_and_a_known_name():
    with pytest.raises(ValueError, match="needs a limit"):
        load("builtin:arithmetic", TOKENIZER, max_prompt_tokens=100)
    with pytest.raises(ValueError, match="'builtin:algebra'; there is builtin:arithmetic, builtin:colouring"):
        load("builtin:algebra", TOKENIZER, limit=3, max_prompt_tokens=100)


def prompt_of(tmp_path, tokenizer=TOKENIZER, **options):
    path = write_rows(tmp_path / "one.jsonl", [PAPER_ROW])
    return decoded(load(path, tokenizer, max_prompt_tokens=200, **options)[0])


def test_templates(tmp_path):
    question = "What is 6 * 7?"
    assert prompt_of(tmp_path, keep_system=True) == f"<system>Think first.\n<user>{question}\n<assistant>"
    assert prompt_of(tmp_path, system_prompt="Be brief.") == f"<system>Be brief.\n<user>{question}\n<assistant>"
    boxed = "{question}\nIn \\boxed{{}}."
    assert prompt_of(tmp_path, prompt_format=boxed) == f"<user>{question}\nIn \\boxed{{}}.\n<assistant>"
    opened = prompt_of(tmp_path, answer_prefix="<think>\n")
    assert opened == f"<user>{question}\n<assistant><think>\n"
    opens = make_tokenizer(CHAT_TEMPLATE + "{{ '<think>\n' }}")  # as of LUFFY's and of DeepSeek-R1's distilled models
    assert prompt_of(tmp_path, opens, answer_prefix="<think>\n") == opened
    plain = prompt_of(tmp_path, BASE_TOKENIZER, chat=False, prompt_format="Q: {question}\nA:")
    assert plain == f"<s>Q: {question}\nA:"  # the tokenizer's own special tokens
    both = make_tokenizer(None)
    both._tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A <s>", special_tokens=[("<s>", 0)])
    ends = prompt_of(tmp_path, both, chat=False, prompt_format="Q: {question}\nA:")
    assert ends == plain  # and not those that would end it before the answer


def test_prompts_by_name():
    def named(name, **changes):
        return PromptFormat.from_options(configured({"data": {"prompt_format": name, **changes}}).data)

    for name in PROMPTS:
        named(name).check_settings()
    question = "What is {x}?"
    gsm8k = f'{question} Let\'s think step by step and output the final answer after "####".'
    assert named("verl_gsm8k", system_prompt="Be brief.").prompt_format.format(question=question) == gsm8k
    boxed = named("verl_math", chat=False).prompt_format.format(question=question)
    assert boxed == f"{question} Let's think step by step and output the final answer within \\boxed{{}}."
    assert named("open_r1").prompt_format == "{question}"
    assert named("open_r1").system_prompt.endswith("<think>\n...\n</think>\n<answer>\n...\n</answer>")
    for changes in ({"system_prompt": "Be brief."}, {"keep_system": True}):
        with pytest.raises(DataError, match="open_r1 brings a system message: leave system_prompt and keep_system out"):
            named("open_r1", **changes)
    with pytest.raises(DataError, match="no place for a system message"):
        named("reasoning_gym", chat=False).check_settings()


def test_prompts_equal_the_chat_template_one_by_one(tmp_path):
    texts = ["a", "ünï ∑", "{braces}", "<s> as text"]
    path = write_rows(tmp_path / "mine.jsonl", [{"question": text, "answer": "1"} for text in texts])
    for text, question in zip(texts, load(path, TOKENIZER, max_prompt_tokens=100), strict=True):
        chat = [{"role": "user", "content": text}]
        expected = TOKENIZER.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert list(question.prompt) == expected


@pytest.mark.parametrize(
    ("tokenizer", "options", "message"),
    [
        (BASE_TOKENIZER, {}, "no chat template: use chat=False"),
        (TOKENIZER, {"prompt_format": "Solve it."}, "does not contain {question}, and is no name of a prompt:"),
        (TOKENIZER, {"prompt_format": "{question} \\boxed{}"}, r"has the field {}.*braces are doubled"),
        (TOKENIZER, {"prompt_format": "{quest}"}, "has the field {quest}"),
        (TOKENIZER, {"prompt_format": "{question"}, "literal braces are doubled"),
        (TOKENIZER, {"system_prompt": "a", "keep_system": True}, "exclude each other"),
        (TOKENIZER, {"system_prompt": "a", "chat": False}, "has no place for a system message"),
        (make_tokenizer("{{ raise_exception('no!') }}"), {}, "refuses the messages: no!"),
    ],
)
def test_options_that_cannot_be(tmp_path, tokenizer, options, message):
    with pytest.raises(ValueError, match=message):
        prompt_of(tmp_path, tokenizer, **options)


@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=30), longest=st.integers(1, 20), data=st.data())
def test_long_prompts_are_dropped_and_counted(lengths, longest, data, tmp_path_factory):
    limit = data.draw(st.none() | st.integers(1, len(lengths)))
    rows = [{"question": "x" * n, "answer": str(i)} for i, n in enumerate(lengths)]
    path = write_rows(tmp_path_factory.getbasetemp() / "lengths.jsonl", rows)
    fits = [str(i) for i, n in enumerate(lengths) if n <= longest]

    def once():
        # One token more for <s>.
        return load(path, BASE_TOKENIZER, chat=False, max_prompt_tokens=longest + 1, limit=limit)

    if not fits:
        with pytest.raises(ValueError, match=rf"all {len(lengths)} prompts .* shortest has {min(lengths) + 1}"):
            once()
        return
    loaded = once()
    assert [question.gold for question in loaded] == fits[:limit]
    assert [question.index for question in loaded] == list(range(len(loaded)))
    taken = int(loaded.questions[-1].gold) + 1 if len(loaded) == limit else len(lengths)
    long = [(str(i), "x" * n, "lengths") for i, n in enumerate(lengths[:taken]) if n > longest]
    assert [(question.gold, question.text, question.source) for question in loaded.left_out] == long
    assert loaded.beyond_limit == len(lengths) - taken


def test_fingerprint_notices_any_change_and_lasts():
    def fingerprint(*pairs):
        return QuestionSet(tuple(Question(i, p, "t", g, "s") for i, (p, g) in enumerate(pairs))).fingerprint

    sets = [
        (((1, 2), "3"), ((4,), "5")),
        (((4,), "5"), ((1, 2), "3")),
        (((1,), "3"), ((2, 4), "5")),
        (((1, 2), "35"), ((4,), "")),
        (((1, 2), "3"),),
    ]
    assert len({fingerprint(*pairs) for pairs in sets}) == len(sets)
    # A fixed value: checkpoints carry it from one process to another.
    expected = "021dccbe1955071d1cc725c33b2ce2e95c6cf0cb896feca18c1f5e31b955c6e4"
    assert fingerprint(((1, 2), "3")) == expected


@pytest.mark.parametrize(
    ("name", "count", "first_gold", "sources"),
    [
        ("gsm8k_train.jsonl", 7473, "72", {"gsm8k_train"}),
        ("arc_challenge.parquet", 1172, "C", {"arc_c"}),
        (
            "math_benchmarks.parquet",
            6023,
            "\\left( 3, \\frac{\\pi}{2} \\right)",
            {"math", "olympiad_bench", "minerva", "aime", "amc", "aime25"},
        ),
    ],
)
def test_real_data_sets(name, count, first_gold, sources):
    if not (SHARED_DATA / name).exists():
        pytest.skip(f"{SHARED_DATA / name} is not there")
    loaded = load(str(SHARED_DATA / name), TOKENIZER, max_prompt_tokens=10_000)
    assert (len(loaded), loaded.left_out) == (count, ())
    assert loaded[0].gold == first_gold
    assert {question.source for question in loaded} == sources
    assert "####" not in "".join(question.gold for question in loaded)
    assert decoded(loaded[0]) == f"<user>{loaded[0].text}\n<assistant>"
