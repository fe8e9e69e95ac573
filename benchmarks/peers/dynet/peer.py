"""A binary TreeLSTM in DyNet with automatic batching; runs in DyNet's own environment.

``mlsys bench batchmaker-trees`` drives it.

Reads a file of weights and trees, then for each line on its standard input computes all trees, 64 a graph, and prints
the CPU seconds of that, graphs included. The states of all roots go to a file after the first.
"""

from __future__ import annotations

import sys
import time

import dynet_config

dynet_config.set(mem=1024, autobatch=1, random_seed=1)
import dynet as dy  # noqa: E402 - it reads its configuration when it is imported
import numpy as np  # noqa: E402

TREES_A_GRAPH = 64


def main(given: str, answers: str) -> None:
    """Serve ``given`` until standard input ends."""
    data = np.load(given, allow_pickle=True)
    size = data["left"].shape[0]
    model = dy.ParameterCollection()
    left, right = (model.parameters_from_numpy(data[name].T.copy()) for name in ("left", "right"))
    bias = model.parameters_from_numpy(data["bias"])
    table = model.lookup_parameters_from_numpy(data["table"])  # a word's part of a leaf's gates
    trees = data["trees"]

    def leaf(word: int) -> tuple[dy.Expression, dy.Expression]:
        gates = dy.lookup(table, word, update=False)
        state = dy.cmult(dy.logistic(gates[:size]), dy.tanh(gates[2 * size :]))
        return dy.cmult(dy.logistic(gates[size : 2 * size]), dy.tanh(state)), state

    def inner(one, other) -> tuple[dy.Expression, dy.Expression]:
        gates = dy.affine_transform([bias, left, one[0], right, other[0]])
        opened = dy.logistic(dy.concatenate([gates[: 2 * size], gates[3 * size :]]))
        state = dy.cmult(opened[:size], dy.tanh(gates[2 * size : 3 * size]))
        state += dy.cmult(opened[2 * size : 3 * size], one[1]) + dy.cmult(opened[3 * size :], other[1])
        return dy.cmult(opened[size : 2 * size], dy.tanh(state)), state

    def run() -> list[np.ndarray]:
        found = []
        for start in range(0, len(trees), TREES_A_GRAPH):
            dy.renew_cg()
            roots = []
            for words, children in trees[start : start + TREES_A_GRAPH]:
                nodes = [leaf(int(word)) for word in words]
                for one, other in children:
                    nodes.append(inner(nodes[one], nodes[other]))
                roots.append(nodes[-1][0])
            dy.forward(roots)
            found += [root.npvalue() for root in roots]
        return found

    np.save(answers, np.stack(run()))
    print("ready", flush=True)
    for _ in sys.stdin:
        begun = time.process_time()
        run()
        print(time.process_time() - begun, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
