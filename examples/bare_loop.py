"""ExGRPO in a bare PyTorch loop: the kernels, a toy language model, and a dictionary as the replay buffer.

    python examples/bare_loop.py    # seconds on one core; it needs only torch

The model reads three letters and is rewarded for writing them in reverse order. At first it guesses: about one answer
in 64 is right. Each group has eight answers. Once its prompt has a success, seven are fresh and one is replayed.

The program prints the share of right fresh answers, of groups with a replayed answer, and the entropy of a letter:

    step 160  reward 0.59  replayed 1.00  entropy 0.23

What to change next: another `right` is another task; REPLAY = False is a run without replay, which learns as fast here,
because each of the 64 prompts is asked often; `clip` and `beta` are options of the loss (docs/kernels.md).
"""

import torch

from exgrpo.kernels import group_advantage, linear_log_prob, linear_policy_loss

LETTERS, LENGTH, PROMPTS, GROUP, STEPS = 4, 3, 32, 8, 160
REPLAY = True
torch.manual_seed(0)
torch.set_num_threads(1)  # faster for a tiny model


class Model(torch.nn.Module):
    """Map letters [N, L] to the hidden states [N, L, D] that predict the next letters."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(LETTERS, width)
        self.body = torch.nn.GRU(width, width, batch_first=True)
        self.head = torch.nn.Linear(width, LETTERS, bias=False)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        """Return the hidden states."""
        return self.body(self.embedding(letters))[0]


model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
buffer: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}  # prompt: a right answer, its log-probs
target = torch.full((PROMPTS * GROUP, 2 * LENGTH - 1), -100)  # -100 masks the prompt's letters

for step in range(1, STEPS + 1):
    prompt = torch.randint(LETTERS, (PROMPTS, LENGTH)).repeat_interleave(GROUP, 0)
    text, replayed = prompt, torch.zeros(PROMPTS, GROUP, dtype=torch.bool)
    with torch.no_grad():
        for _ in range(LENGTH):  # the rollouts, letter by letter
            text = torch.cat([text, torch.multinomial(model.head(model(text)[:, -1]).softmax(-1), 1)], 1)
        target[:, LENGTH - 1 :] = text[:, LENGTH:]
        old, entropy = linear_log_prob(model(text[:, :-1]), model.head.weight, target)
    keys = [tuple(row) for row in prompt[::GROUP].tolist()]
    for group, key in enumerate(keys if REPLAY else []):
        if key in buffer:  # replace the group's first answer
            row = group * GROUP
            text[row, LENGTH:], old[row], replayed[group, 0] = *buffer[key], True
    target[:, LENGTH - 1 :] = text[:, LENGTH:]
    right = (text[:, LENGTH:] == prompt.flip(1)).all(1)
    fresh = ~replayed.flatten()
    for row in (right & fresh).nonzero().flatten().tolist():
        buffer[keys[row // GROUP]] = text[row, LENGTH:].clone(), old[row].clone()
    advantage = group_advantage(right.float(), torch.arange(PROMPTS).repeat_interleave(GROUP))
    states = model(text[:, :-1])
    result = linear_policy_loss(
        states, model.head.weight, target, old, advantage, replayed=replayed.flatten(), clip=None, entropy_coef=0.001
    )
    optimizer.zero_grad()
    result.loss.backward()
    optimizer.step()
    if step % 20 == 0 or step == 1:
        share, spread = right[fresh].float().mean(), entropy[:, LENGTH - 1 :].mean()
        print(f"step {step:3}  reward {share:.2f}  replayed {replayed.any(1).float().mean():.2f}  entropy {spread:.2f}")
