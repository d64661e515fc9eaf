r"""Generated graphs to colour, with their reward: three colours, and no edge joins nodes of one colour.

Most graphs have many right colourings, but a random colouring is right only with a probability of about (2/3)^edges.

    question  "Colour a to d with R, G, B so that edges differ: ab ac bd."
    answer    "abcd ab ac bd": the nodes, then the edges; rewards get it as the gold answer
    response  "<think> a=R; a=R b=G; a=R c=B; b=G d=R</think>\boxed{a=R b=G c=B d=R}"

The splits share no problem: a hash of the number of nodes and the sorted edges decides the split of a problem. Graphs
that differ only by the names of their nodes are different problems.
"""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

from exgrpo.train.common.errors import DataError, shown
from exgrpo.train.common.functions import ASSETS
from exgrpo.train.data.tasks import Split, check_difficulty, different_problems
from exgrpo.train.reward.grading import own_answer

MODEL_FOLDER = ASSETS / "colouring"
"""Pretrained model and tokenizer in Hugging Face format."""

REWARD = "exgrpo.train.data.tasks.colouring:reward"

MAX_PROMPT_TOKENS = 24
"""Bound on the tokens of every question with the chat template of the shipped tokenizer."""

MAX_RESPONSE_TOKENS = 48
"""Bound on the tokens of every worked solution with the shipped tokenizer, the end token included."""

DEFAULT_DIFFICULTY = 3
COLOURS = "RGB"

_SIZES = {1: (7, 6), 2: (7, 8), 3: (7, 10), 4: (8, 13)}
"""Numbers of nodes and edges, by difficulty."""
_LONGEST = 200
_COLOUR = re.compile(rf"([a-z]) *[=:] *([{COLOURS}])")
_COLOURING = re.compile(rf"{_COLOUR.pattern}(?:(?: *[,;] *| +){_COLOUR.pattern})*")


@dataclass(frozen=True)
class ColouringProblem:
    """One question; `answer` is the nodes followed by the edges."""

    question: str
    answer: str
    nodes: str
    """One letter for each node."""
    edges: tuple[str, ...]
    """Pairs of nodes, in the order of the question."""

    difficulty: int


def generate(split: Split, count: int, seed: int, *, difficulty: int = DEFAULT_DIFFICULTY) -> list[ColouringProblem]:
    """Return `count` different problems of the split, deterministic in the arguments.

    Difficulty 1 has 7 nodes and 6 edges, 2 has 7 and 8, 3 has 7 and 10, 4 has 8 and 13. Every graph has a right
    colouring. Raises DataError for another difficulty, and if the split has too few different problems.
    """
    check_difficulty(difficulty, _SIZES)
    size, count_of_edges = _SIZES[difficulty]
    nodes = "abcdefgh"[:size]
    pairs = [a + b for a, b in combinations(nodes, 2)]

    def draw(rng: random.Random) -> ColouringProblem:
        while True:
            edges = tuple(rng.sample(pairs, count_of_edges))
            if next(_right_colourings(nodes, edges), None):
                break
        named = f"{nodes[0]} to {nodes[-1]} with {', '.join(COLOURS)}"
        question = f"Colour {named} so that edges differ: {' '.join(edges)}."
        return ColouringProblem(question, " ".join((nodes, *edges)), nodes, edges, difficulty)

    return different_problems(draw, lambda problem: " ".join((nodes, *sorted(problem.edges))), split, count, seed)


def format_solution(nodes: str, colours: str) -> str:
    r"""Return the text of a response: the colour of each node in \boxed{}."""
    return f"\\boxed{{{' '.join(f'{node}={colour}' for node, colour in zip(nodes, colours, strict=True))}}}"


def worked_solution(problem: ColouringProblem, colours: str) -> str:
    """Return a response: for each node its earlier neighbours, then itself, in <think> tags, and the box."""
    colour = dict(zip(problem.nodes, colours, strict=True))
    groups = []
    for node in problem.nodes:
        near = sorted(edge[0] for edge in problem.edges if edge[1] == node)
        groups.append("".join(f" {each}={colour[each]}" for each in (*near, node)))
    return f"<think>{';'.join(groups)}</think>{format_solution(problem.nodes, colours)}"


def reward(response: str, gold: str) -> float:
    """Return 1.0 if `response` colours each node of `gold` once, and the ends of every edge differently, else 0.0.

    The answer is the content of the last box, after the last "</think>" if there is one: node=colour for each node in
    any order, separated by spaces, commas or semicolons. `gold` is the nodes followed by the edges. Raises DataError if
    it is not.
    """
    colours = _colouring(response)
    if not colours:
        return 0.0
    nodes, edges = _graph(gold)
    return float(colours.keys() == set(nodes) and all(colours[edge[0]] != colours[edge[1]] for edge in edges))


def reward_key(response: str, gold: str) -> str:
    """Return the partition of the nodes in the answer, right or wrong; "" unless it colours each node once.

    The key has a digit per node in alphabetical order; equal digits are equal colours, numbered from 0 in order of
    appearance. So answers that differ only by a permutation of the colours are the same solution: no question
    distinguishes the colours, and each solution would count six times otherwise. Raises DataError if `gold` is not the
    nodes followed by the edges.
    """
    colours = _colouring(response)
    if not colours or colours.keys() != set(_graph(gold)[0]):
        return ""
    numbers: dict[str, int] = {}
    return "".join(str(numbers.setdefault(colours[node], len(numbers))) for node in sorted(colours))


def reward_form(response: str, gold: str) -> float:
    """Return 1.0 if the last box of `response` colours nodes, right or wrong, else 0.0; `gold` is ignored."""
    return float(bool(_colouring(response)))


def _colouring(response: str) -> dict[str, str]:
    """Return the colour of each node in the answer; empty without an answer, or if a node has two colours."""
    content = own_answer(response)
    if not content or len(content) > _LONGEST or not _COLOURING.fullmatch(content):
        return {}
    pairs = _COLOUR.findall(content)
    colours = dict(pairs)
    return colours if len(colours) == len(pairs) else {}


def _graph(gold: str) -> tuple[str, list[str]]:
    nodes, *edges = gold.split() or [""]
    if not nodes or not all(len(edge) == 2 and set(edge) <= set(nodes) for edge in edges):
        raise DataError(f"the answer of a colouring problem is the nodes and then the edges, not {shown(gold)}")
    return nodes, edges


def _right_colourings(nodes: str, edges: tuple[str, ...], colours: str = "") -> Iterator[str]:
    """Yield the right colourings that extend these colours of the first nodes."""
    if len(colours) == len(nodes):
        yield colours
        return
    place = len(colours)
    taken = {colours[nodes.index(edge[0])] for edge in edges if edge[1] == nodes[place]}
    for colour in COLOURS:
        if colour not in taken:
            yield from _right_colourings(nodes, edges, colours + colour)
