"""Syntactic heads of an encoder (Clark et al. 2019, What does BERT look at?).

For each relation: the head, of all heads and both directions, that finds the most governors, and the best fixed
offset beside it. The best of many heads is picked on the same sentences it is judged on, here as in the paper, so
with few sentences it flatters; the role's own claims are corrected for that.

The paper's figures are BERT-base-uncased's on the development set of the Wall Street Journal treebank, which is not
free to hand out. Without --data, the script reads some forty short sentences of our own, annotated in the same
relations (Stanford dependencies); their figures cannot be compared with the paper's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial

from common import Figure, is_model, main

import headlab as hl
from headlab.roles.syntactic import DIRECTIONS, Syntactic
from headlab.tasks import data_folder

BERT = "bert-base-uncased"
#: Accuracy in per cent of the best head and, where the paper gives it, of the best offset; layers and heads from 0.
PUBLISHED = {
    "det": (94.3, "L7H10", 51.7),
    "dobj": (86.8, "L7H9", None),
    "pobj": (76.3, "L8H5", None),
    "aux": (81.1, "L3H9", None),
    "poss": (80.5, "L6H5", None),
    "nsubj": (58.5, "L7H1", None),
    "all": (34.7, "L6H5", None),
}


def run(model: hl.Model, seed: int, n_prompts: int, data: str | None = None) -> list[Figure]:
    """The figures; seed and prompts have no use here, since the sentences are given."""
    role = Syntactic()
    source = data or data_folder() / "dependencies.jsonl"
    scores = hl.score(model, [role], data={"syntactic": source}, seed=seed)
    comparable = is_model(model, BERT) and data is not None
    frame = scores.details
    figures = []
    for relation, (accuracy, head, offset) in PUBLISHED.items():
        names = [f"{relation} {direction}" for direction in DIRECTIONS]
        rows = frame[frame["detail"].isin(names)]
        note = f"published: {head}; needs 10 pairs or more, which the sentences do not hold"
        ours = None
        if not rows.empty:
            best = rows.loc[rows["value"].idxmax()]
            ours = 100 * best["value"]
            label = hl.roles.head_label(best["layer"], best["head"])
            direction = best["detail"].split()[-1].replace("_", " ")
            chance = best["meaning"].split("; ")[-1]
            note = f"ours: {label}, {direction}; {chance}; published: {head}"
        if offset is not None:
            note += f", best offset {offset} %"
        figures.append(Figure(f"{relation}: best head (%)", ours, accuracy, BERT, comparable, note))
    claimed = scores.claimed("syntactic")
    figures.append(Figure("heads claimed over all relations", ", ".join(claimed) or "none"))
    return figures


def from_command_line(arguments: Sequence[str]) -> None:
    """Take --data, and leave the other options to the scripts' common command line."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--data")
    given, rest = parser.parse_known_args(arguments)
    about = f"{__doc__}\n--data FILE reads sentences of yours; `headlab tasks schema syntactic` says in what form."
    main(partial(run, data=given.data), about, rest)


if __name__ == "__main__":
    from_command_line(sys.argv[1:])
