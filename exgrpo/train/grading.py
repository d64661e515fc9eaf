r"""The mathematics of grading: which part of a response is its answer, and whether it equals the gold answer.

Reading a response
    `math` grades what follows the LAST "</think>" (thinking ends where the answer begins; a response without the tag
    is worth 0, so a truncated one is too). `math_no_think` takes the whole response.
    In that text the last \boxed{...} (or \fbox{...}) is the answer. Boxes directly before it, joined by a comma, a
    semicolon, "and" or "or", belong to it: "\boxed{1} and \boxed{2}" is the answer "1, 2". A last box that is never
    closed is no answer. Text without any box is left to Math-Verify's own search ("the final answer is ...", the
    last formula, the last number).

Reading a gold answer
    It is read as the content of a box, so "72", "1,000", "3/4", "\frac{3}{4}", "$69$, $84$", "[0, 1)" or "50\%"
    need no delimiters. Notations that Math-Verify misreads are rewritten first, in gold answers and in boxes:
    "4.5e33" (it would mean 4.5 * e * 33), "-1./3", "72.", "1\,000" and "1 000" (which would mean 1 * 0).

Comparing
    Math-Verify's verify(gold, answer): numbers to 6 decimals, formulas symbolically, sets, tuples and intervals by
    element, in order where order counts; units, "$", degree signs and the base of "52_8" are ignored, "50\%" equals
    0.5 and 50, and "x=5" equals 5. The gold answer repeated letter by letter is right even if it cannot be parsed.
    A gold answer that is one capital letter A to J is a choice: "C", "(C)", "\text{C}", "C) 5 m" and, without a box,
    "the answer is C" count; naming several choices does not.

Both functions return 1.0 or 0.0 and set no time limit: Math-Verify's own limits work through SIGALRM, which a call
into C does not heed and threads cannot use, so they are off, and exgrpo.train.reward.Grader sets a hard one.
"""

import functools
import logging
import re
from typing import Any

END_OF_THINKING = "</think>"

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_CONNECTOR = re.compile(r"[\s$]*(?:[,;]|(?:,\s*)?(?:\\text\{\s*)?(?:and|or)(?:\s*\})?)[\s$]*")
_SCIENTIFIC = re.compile(r"(?<![\w.\\}])(\d+\.?\d*|\.\d+)[eE]([+-]?\d+)(?![\w.])")
_THOUSANDS = re.compile(r"(?<=\d)\\[,!;: ](?=\d{3}(?!\d))")
_SPACED_NUMBER = re.compile(r"\\boxed\{-?\d{1,3}(?: \d{3})+(?:\.\d+)?\}")
_IDLE_POINT = re.compile(r"(?<=\d)\.(?=\s*/)|(?<!\\right)\.\s*(?=\}$)")
_INTEGER = re.compile(r"-?[0-9]{1,1000}")
_CHOICE = re.compile(r"[A-J]")
_CHOICE_MARKUP = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mathit|rm|bf)\b|[{}$*]")
_CHOICE_TEXT = re.compile(r"\s*\(?\s*([A-J])\s*(?:[).:](.*))?", re.DOTALL)
_CHOICE_SENTENCE = re.compile(
    r"(?i:answer)(?i:\s+is)?(?i::?\s+(?:option|choice))?[\s:(]*([A-J])(?=\)?\s*(?:$|[.,:)\n]))"
)


def math(response: str, gold: str) -> float:
    """1.0 when the part of `response` after the last "</think>" holds the answer `gold`, else 0.0."""
    answer = answer_after_thinking(response)
    return 0.0 if answer is None else math_no_think(answer, gold)


def math_no_think(response: str, gold: str) -> float:
    """1.0 when `response`, with or without thinking, holds the answer `gold`, else 0.0."""
    answer, gold = final_answer(response), gold.strip()
    if not answer or not gold:
        return 0.0
    if _CHOICE.fullmatch(gold):
        return float(_choice(answer) == gold)
    content = boxed_answer(answer)
    if content == gold:
        return 1.0
    if content and _INTEGER.fullmatch(content) and _INTEGER.fullmatch(gold):
        return float(int(content) == int(gold))  # what Math-Verify says too, in a thousandth of the time
    parsed = _parse(answer)
    return float(bool(parsed) and _math_verify().verify(_parse_gold(gold), parsed, timeout_seconds=None))


def answer_after_thinking(response: str) -> str | None:
    """`final_answer` of what follows the last "</think>"; None when the response never stops thinking."""
    _, tag, rest = response.rpartition(END_OF_THINKING)
    return final_answer(rest) if tag else None


def final_answer(text: str) -> str:
    r"""The least piece of `text` that decides its grade: "\boxed{...}", or the stripped text if it has no box.

    Empty when the last box is not closed. final_answer(final_answer(t)) == final_answer(t).
    """
    content = boxed_answer(text)
    if content is None:
        return text.strip()
    return f"\\boxed{{{content}}}" if content else ""


def boxed_answer(text: str) -> str | None:
    """Content of the last box of `text` and of those joined to it; "" if it is not closed, None without a box."""
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    end = _closing_brace(text, boxes[-1].end())
    if end is None:
        return ""
    contents = [text[boxes[-1].end() : end].strip()]
    start = boxes[-1].start()
    for box in reversed(boxes[:-1]):
        end = _closing_brace(text, box.end())
        if end is None or not _CONNECTOR.fullmatch(text, end + 1, max(start, end + 1)):
            break
        contents.append(text[box.end() : end].strip())
        start = box.start()
    return ", ".join(dict.fromkeys(reversed(contents)))


def _closing_brace(text: str, start: int) -> int | None:
    """Index of the brace that closes the one opened just before `start`."""
    depth = 1
    for token in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(token.group(), 0)
        if depth == 0:
            return token.start()
    return None


def _choice(answer: str) -> str | None:
    """The one choice A to J that `answer` names, None when it names none or several."""
    content = boxed_answer(answer)
    text = _CHOICE_MARKUP.sub("", answer if content is None else content)
    if match := _CHOICE_TEXT.fullmatch(text):
        several = match[2] is not None and re.search(r"\b[A-J][).:]", match[2])
        return None if several else match[1]
    sentences = _CHOICE_SENTENCE.findall(text) if content is None else []
    return sentences[-1] if sentences else None


@functools.cache
def _math_verify() -> Any:
    """Math-Verify, imported on first use (it brings sympy); its warning that no time limit is set is silenced."""
    import math_verify

    for module in ("parser", "grader"):
        logging.getLogger(f"math_verify.{module}").setLevel(logging.ERROR)
    return math_verify


@functools.cache
def _extraction() -> list[Any]:
    library = _math_verify()
    return [library.LatexExtractionConfig(boxed_match_priority=0), library.ExprExtractionConfig()]


@functools.lru_cache(maxsize=4096)
def _parse_gold(gold: str) -> list[Any]:
    """Candidates for the gold answer; the group of rollouts of one question parses it once per process."""
    content = boxed_answer(gold)
    return _parse(f"\\boxed{{{gold if content is None else content}}}")


def _parse(answer: str) -> list[Any]:
    """Candidates that Math-Verify reads in a piece of text: sympy expressions, then the text itself as written."""
    if answer.startswith("\\boxed{"):
        answer = _THOUSANDS.sub("", _IDLE_POINT.sub("", answer))
        answer = _SCIENTIFIC.sub(r"\1 \\times 10^{\2}", answer)
        if _SPACED_NUMBER.fullmatch(answer):
            answer = answer.replace(" ", "")
    return _math_verify().parse(answer, _extraction(), parsing_timeout=None)
