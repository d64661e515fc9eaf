r"""Math grading: extract the answer from a response and compare it with the gold answer.

Reading a response
    `math` grades the text after the LAST "</think>" (thinking ends where the answer begins; a response without the
    tag, such as a truncated one, is worth 0). `math_no_think` grades the whole response.
    In that text the last \boxed{...} (or \fbox{...}) is the answer. Boxes directly before it, joined by LaTeX's spaces,
    a comma, "and", "or" and the like, belong to it: "\boxed{1} and \boxed{2}" is the answer "1, 2", so naming several
    answers earns nothing. A last box that is never closed is no answer. In text without any box, only the content of
    the last <answer> tags counts, if there are any.
    The answer is what the last "the answer is ...", "Answer: ..." or "#### ..." states up to the end of its sentence,
    else the text itself if it is only a formula, or the few words in tags. Anything else goes to Math-Verify's own
    search (the last formula, the last number).
    `FORMS` are the places where an answer is searched for if `reward.form` names one.

Reading a gold answer
    It is read like the content of a box, so "72", "1,000", "3/4", "\frac{3}{4}", "$69$, $84$", "[0, 1)" or "50\%"
    need no delimiters. exgrpo.train.reward.notation splits both into formulas and words. A gold answer that means
    "none" ("None", "N/A", "proof") makes every response worth 0.

Comparing
    exgrpo.train.reward.equality defines equality and the tolerance of numbers. In doubt the stricter reading wins: a
    rejected right answer costs a little signal, an accepted wrong one is learned.
    The gold answer repeated letter by letter is right even if it cannot be parsed. A gold answer that is one capital
    letter A to J is a choice: "C", "(C)", "\text{C}", "C) 5 m" and "option C" match; naming several choices does not.

Form
    `math_form` and `math_no_think_form` check whether a response has the form that these rewards require, right or
    wrong; `math_found` and `math_no_think_found` whether these rewards find any answer in it.

All functions return 1.0 or 0.0 and set no time limit: Math-Verify's own limits use SIGALRM, which cannot interrupt a
call into C and does not work in threads, so they are off, and exgrpo.train.reward.pool.Grader sets a hard one.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from exgrpo.train.reward.equality import equal, math_verify, readable
from exgrpo.train.reward.notation import closing_brace, qualified, understand

END_OF_THINKING = "</think>"
AUTO = "auto"
"""Value of `reward.form` with which each reward looks for the answer where its source has it by convention."""

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BETWEEN = 160  # longest text that may join two boxes
_MARKUP = re.compile(
    r"\\(?:[hv]space\*?|(?:text)?color|begin|end)\s*\{[^{}]*\}|\n\s*-\s|[\s$*~{}&()%]|\\\\|"
    r"\\[,;:! ()\[\]&%]|\^\s*\{?\s*\\circ|"
    r"\\(?:text\w*|math(?:rm|bf|it)|mbox|bm|boldsymbol|underline|left|right|displaystyle|q?quad|large|Large|LARGE|huge|"
    r"normalsize|small|hfill|newline|par|noindent|item|rm|bf|it)(?![A-Za-z])"
)
_JOINED = re.compile(
    r"(?i)\s*(?:(?:[a-z/^0-9]+\s+){0,2}[.,]?\s*(?:and|or)\b|[,;/|]|\\(?:lor|land|vee|wedge|mid)(?![a-z]))?"
    r"(?:\s*(?:and|or|and/or|also|else|maybe|perhaps|possibly|either|both|as well as|alternatively)\b,?)*"
    r"\s*(?:\\?[a-z]+(?:_\s*\w+)?'*\s*=)?\s*"
)
_OPEN, _CLOSE = "<answer>", "</answer>"
_HASHES = re.compile(r"#### (-?[0-9.,]+)")
_LINE = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")
_LAST_CHARACTERS = 300  # verl searches only these for "####" and "Answer:"
_NO_ANSWER = re.compile(r"(?i)\s*(?:|proofs?|not\s*found|nan|none|null|n\s*/\s*a|no\s+answer)[\s.]*")
_INTEGER = re.compile(r"-?[0-9]{1,1000}")
_STATEMENT = re.compile(r"(?i)(?:\banswers?\b\**[^.:=\n]{0,60}?(?:\b(?:is|are|be)\b|[:=])|####)[\s:*]*")
_FORMULA = r"(?:\$\$.+?\$\$|(?<!\\)\$(?:(?![.!?]\s+[A-Z])(?:\\\$|[^$\n]))+?(?<!\\)\$|\\\(.+?\\\)|\\\[.+?\\\])"
_FORMULAS = re.compile(rf"{_FORMULA}(?:\s*(?:,|;|(?:,\s*)?(?:and|or)\b)\s*{_FORMULA})*", re.DOTALL)
_SENTENCE = re.compile(
    r".*?(?=(?<!\\)[.!?](?:[\s*]|$)|\n|$|"
    r"(?<=\S)[,;]?\s+(?:because|since|as|which|so|where|for|when|if)\b|,\s+(?!(?:and|or)\b)[a-z]{2,})"
)
_PROSE = re.compile(r"((?:(?:[A-Za-z']{2,}|a|I)\s+){1,5})(?=-?\\?\$|-?\d)")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_MOST_WORDS = 4
_CHOICE = re.compile(r"\(?([A-J])\)?")
_CHOICE_MARKUP = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mathit|rm|bf)\b|[{}$*~]|\\[,;:! ]|\\q?quad\b")
_CHOICE_TEXT = re.compile(r"\s*(?i:option|choice)?\s*\(?\s*([A-J])\s*(?:[).:](.*))?", re.DOTALL)


def math(response: str, gold: str) -> float:
    """Return 1.0 if the part of `response` after the last "</think>" holds the answer `gold`, else 0.0."""
    answer = answer_after_thinking(response)
    return 0.0 if answer is None else math_no_think(answer, gold)


def math_no_think(response: str, gold: str) -> float:
    """Return 1.0 if `response`, with or without thinking, holds the answer `gold`, else 0.0."""
    answer, gold = final_answer(response), gold.strip()
    if not answer or no_answer(gold):
        return 0.0
    content = boxed_answer(answer)
    if choice := _gold_choice(gold):
        return float(content is not None and _choice(content) == choice)
    if gold in (content, answer):
        return 1.0
    if content and _INTEGER.fullmatch(content) and _INTEGER.fullmatch(gold):
        return float(int(content) == int(gold))  # same result, much faster
    boxed_gold = boxed_answer(gold)
    written = understand(gold if boxed_gold is None else boxed_gold)
    if content is None:
        content = _found_answer(answer)
    return float(content is not None and equal(written, understand(content)))


def no_answer(gold: str) -> bool:
    """Return True if a gold answer means "none": "", "None", "N/A", "proof", "not found"."""
    return _NO_ANSWER.fullmatch(_CHOICE_MARKUP.sub(" ", boxed_answer(gold) or gold)) is not None


def readable_gold(gold: str) -> bool:
    """Return True if `math` and `math_no_think` can give 1.0 to a text other than the gold answer itself.

    That holds for a choice, words, or anything the parser reads. No time limit is set: see the module's docstring.
    """
    if no_answer(gold):
        return False
    if _INTEGER.fullmatch(gold) or _gold_choice(gold.strip()):
        return True
    return readable(understand(boxed_answer(gold) or gold.strip()))


def math_form(response: str, gold: str) -> float:
    """Return 1.0 if `response` ends its thinking and the rest has the form of `math_no_think_form`, else 0.0."""
    _, tag, rest = response.rpartition(END_OF_THINKING)
    return math_no_think_form(rest, gold) if tag else 0.0


def math_no_think_form(response: str, gold: str) -> float:
    """Return 1.0 if `response` has an answer in a closed box, in tags or a short one ("the answer is ..."), else 0.0.

    `gold` is ignored: a wrong answer may have the right form.
    """
    content = boxed_answer(response)
    if content is None and tagged_answer(response) is not None:
        return float(final_answer(response).startswith("\\boxed{"))
    if content is not None:
        return float(content != "")
    stated = _stated_answer(response) or ""
    return float(stated != "" and len(_WORD.findall(stated)) <= _MOST_WORDS)


def math_found(response: str, gold: str) -> float:
    """Return 1.0 if `math` finds an answer in `response`, right or wrong, else 0.0."""
    answer = answer_after_thinking(response)
    return 0.0 if answer is None else math_no_think_found(answer, gold)


def math_no_think_found(response: str, gold: str) -> float:
    """Return 1.0 if `math_no_think` finds an answer in `response`, right or wrong, else 0.0; `gold` is ignored."""
    answer = final_answer(response)
    return float(answer != "" and bool(boxed_answer(answer) or _found_answer(answer)))


def answer_after_thinking(response: str) -> str | None:
    """Return `final_answer` of the text after the last "</think>"; None if the response never stops thinking."""
    _, tag, rest = response.rpartition(END_OF_THINKING)
    return final_answer(rest) if tag else None


def math_part(response: str) -> str | None:
    """Return the part of `response` on which the grade of `math` depends; None: the grade is 0."""
    answer = answer_after_thinking(response)
    return None if answer is None else f"{END_OF_THINKING}{answer}"


def math_no_think_part(response: str) -> str | None:
    """Return the part of `response` on which the grade of `math_no_think` depends; None: the grade is 0."""
    return final_answer(response) or None


def final_answer(text: str) -> str:
    r"""Return the shortest text with the same grade: "\boxed{...}", or the stripped text if it states no answer.

    Empty if the last box is not closed. Idempotent: final_answer(final_answer(t)) == final_answer(t).
    """
    content, most_words = boxed_answer(text), 0
    if content is None and (tagged := tagged_answer(text)) is not None:
        text, most_words = tagged, _MOST_WORDS
    if content is None:
        content = _stated_answer(text)
    if content is None and len(_WORD.findall(text)) <= most_words and "\n" not in text.strip():
        content = text.strip()
    if content is None:
        return text.strip()
    return f"\\boxed{{{content}}}" if content and closing_brace(content + "}", 0) == len(content) else ""


def boxed_answer(text: str) -> str | None:
    """Return the content of the last box and of boxes joined to it; "" if it is not closed, None without a box."""
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    end = closing_brace(text, boxes[-1].end())
    if end is None:
        return ""
    contents = [text[boxes[-1].end() : end].strip()]
    start = boxes[-1].start()
    for box in reversed(boxes[:-1]):
        end = closing_brace(text, box.end())
        if end is None or end >= start or not _joins(text[end + 1 : start]):
            break
        contents.append(text[box.end() : end].strip())
        start = box.start()
    return ", ".join(dict.fromkeys(reversed(contents))).strip()


def _joins(between: str) -> bool:
    return len(between) <= _BETWEEN and _JOINED.fullmatch(_MARKUP.sub(" ", between)) is not None


def tagged_answer(text: str) -> str | None:
    """Return the stripped content of the last <answer> tags, as reasoning-gym reads it; None without a closed pair."""
    content, end = None, 0
    while (start := text.find(_OPEN, end)) >= 0 and (close := text.find(_CLOSE, start)) >= 0:
        content, end = text[start + len(_OPEN) : close].strip(), close + len(_CLOSE)
    return content


def own_answer(response: str) -> str | None:
    """Return the content of the last box after the thinking, else of the last <answer> tags; None without both."""
    text = response.rpartition(END_OF_THINKING)[2]
    boxed = boxed_answer(text)
    return tagged_answer(text) if boxed is None else boxed


@dataclass(frozen=True)
class Form:
    """A place where an answer is written.

    Attributes:
        shown: name of the form in messages.
        read: returns the answer in this form from the text after the thinking, None without one.
    """

    shown: str
    read: Callable[[str], str | None]

    def alone(self, response: str) -> str | None:
        """Return the answer in this form, after the end of thinking, rewritten so that all rewards find it."""
        _, tag, text = response.rpartition(END_OF_THINKING)
        answer = self.read(text)
        if not answer:
            return None
        return f"{tag}\\boxed{{{answer}}}" if self.read is boxed_answer else f"{tag}{_OPEN}{answer}{_CLOSE}"


def _after_hashes(text: str) -> str | None:
    found = _HASHES.findall(text[-_LAST_CHARACTERS:])
    return found[-1].replace(",", "") if found else None


def _on_line(text: str) -> str | None:
    found = _LINE.findall(text[-_LAST_CHARACTERS:])
    return found[-1].strip() if found else None


FORMS = {
    "boxed": Form("\\boxed{}", boxed_answer),
    "tags": Form("<answer> tags", tagged_answer),
    "hashes": Form('"#### 12"', _after_hashes),
    "line": Form('"Answer: 12"', _on_line),
}
"""Forms by the values of `reward.form`: MATH; reasoning-gym and open-r1; GSM8K; DAPO."""


def _stated_answer(text: str) -> str | None:
    """Return the answer that the last "the answer is ..." of `text` states; "" if empty, None without such a phrase."""
    statements = list(_STATEMENT.finditer(text))
    if not statements:
        return None
    rest = text[statements[-1].end() :]
    formulas = _FORMULAS.match(rest)
    start = formulas.end() if formulas else 0
    sentence = _SENTENCE.match(rest, start)
    content = rest[: sentence.end() if sentence else start].strip(" *\n")
    prose = _PROSE.match(content)
    return content[prose.end() :] if prose and not qualified(prose[1]) else content


def _found_answer(text: str) -> str | None:
    """Return what Math-Verify's search finds in a text that states no answer, verbatim."""
    library = math_verify()
    targets = [library.LatexExtractionConfig(boxed_match_priority=-1), library.ExprExtractionConfig()]
    found = library.parse(text, targets, parsing_timeout=None)
    return str(found[-1]) if found else None


def _gold_choice(gold: str) -> str | None:
    r"""Return the letter of a gold answer that is a choice: "C", "\text{(C)}"."""
    match = _CHOICE.fullmatch(_CHOICE_MARKUP.sub("", gold).strip())
    return match[1] if match else None


def _choice(content: str) -> str | None:
    """Return the one choice A to J in the content of a box, None if it has none or several."""
    match = _CHOICE_TEXT.fullmatch(_CHOICE_MARKUP.sub("", content))
    several = match is not None and match[2] is not None and re.search(r"\b[A-J][).:]", match[2])
    return match[1] if match and not several else None
