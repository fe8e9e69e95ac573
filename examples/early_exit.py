"""Train a small network with two exits, and serve it: how much accuracy does a shorter way cost, and what does it save?

python examples/early_exit.py            # the table
python examples/early_exit.py --serve    # POST /predict with 64 grey values; answers with the digit and its exit
"""

from __future__ import annotations

import sys
import time

import torch
from mlsys_dvabatch import Service
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional


class TwoExits(nn.Module):
    """Grey values [b, 64] -> scores of ten digits behind a quarter of the layers, and behind all."""

    def __init__(self, width: int = 768) -> None:
        super().__init__()
        self.start = nn.Sequential(nn.Linear(64, 128), nn.ReLU())
        self.early = nn.Linear(128, 10)
        layers = [nn.Linear(128, width), nn.ReLU()] + [nn.Linear(width, width), nn.ReLU()] * 4
        self.rest, self.late = nn.Sequential(*layers), nn.Linear(width, 10)

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores of both exits."""
        hidden = self.start(pixels)
        return self.early(hidden), self.late(self.rest(hidden))


def train(steps: int = 400) -> tuple[TwoExits, Tensor, Tensor]:
    """Return the trained network, and the digits that it has not seen with their labels."""
    torch.manual_seed(0)
    digits = load_digits()
    pixels, labels = torch.tensor(digits.data).float() / 16, torch.tensor(digits.target)
    order = torch.randperm(len(labels))
    seen, unseen = order[:1200], order[1200:]
    model = TwoExits()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(steps):
        batch = seen[torch.randint(len(seen), (128,))]
        loss: Tensor = sum(functional.cross_entropy(scores, labels[batch]) for scores in model(pixels[batch]))  # type: ignore[assignment]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval(), pixels[unseen], labels[unseen]


def service(model: TwoExits, confidence: float) -> Service:
    """Return the network as a service whose requests leave at the first exit that is so sure."""
    return Service(
        model,
        example=torch.zeros(1, 64),
        policy="early-exit",
        exit_confidence=confidence,
        postprocess=lambda result: {"digit": int(result[0].argmax()), "exit": int(result[1])},
    )


def main() -> None:
    """Print the table, or serve."""
    model, pixels, labels = train()
    if "--serve" in sys.argv:
        raise SystemExit(service(model, 0.9).run())
    print(f"{'confidence':>10} {'accuracy':>9} {'left early':>11} {'ms a digit':>11}")
    for confidence in (1.0, 0.99, 0.9, 0.7, 0.5):
        digits = service(model, confidence)
        began = time.perf_counter()
        answers = [digits(row) for row in pixels]
        each_ms = (time.perf_counter() - began) / len(answers) * 1e3
        right = sum(answer["digit"] == int(label) for answer, label in zip(answers, labels, strict=True))
        early = sum(answer["exit"] == 0 for answer in answers)
        print(f"{confidence:>10} {right / len(answers):>9.1%} {early / len(answers):>11.1%} {each_ms:>11.3f}")


if __name__ == "__main__":
    main()
