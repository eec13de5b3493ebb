"""One rank that runs several commands of sample_ddp.py and notes what its network was
tuned for and evaluated.

Rank 0 prints JSON: of each command what it printed, and what each rank found.
"""

import json
import sys
from contextlib import nullcontext, redirect_stdout
from io import StringIO
from math import prod

import sample_ddp
from accel import pipeline
from accel.fast.network import FastNetwork
from accel.jobs import grid
from accel.latents import files
from accel.network import Plain
from accel.ranks import launched

found = {}
load_network = pipeline.load_network
load_decoder = files.load


def load_and_note(state, spec, given, tier, device, batch, *others):
    found["prepared"] = prod(batch.rows[0])
    return load_network(state, spec, given, tier, device, batch, *others)


def tune_and_note(self, row_tokens):
    found["tuned"] = sorted({*found["tuned"], *row_tokens})


def noting(evaluate):
    """A network's forward_blocks that notes what it is given."""

    def forward_blocks(self, h, *how):
        if h.shape[0] * h.shape[1] not in found["tuned"]:
            found["not tuned"].append(h.shape[:2])
        if (shape := [*h.shape[:2]]) not in found["evaluated"]:
            found["evaluated"].append(shape)
        return evaluate(self, h, *how)

    return forward_blocks


def warm_up_and_note(run, pipeline, batches, watch):
    pipeline.warm_up(run["labels"], batches)  # also on a CPU
    found["warm"] = [*found["evaluated"]]


def load_decoder_and_note(*arguments):
    found["loaded a VAE"] = True
    return load_decoder(*arguments)


if __name__ == "__main__":
    pipeline.load_network = load_and_note
    files.load = load_decoder_and_note
    grid.warm_up = warm_up_and_note
    for kind in (Plain, FastNetwork):
        kind.forward_blocks = noting(kind.forward_blocks)
        kind.tune = tune_and_note
    results = []
    with launched.launched_ranks("commands_worker.py") as ranks:
        launched.launched_ranks = lambda *_: nullcontext(ranks)
        for command in json.loads(sys.argv[1]):
            print("sample_ddp.py", *command, file=sys.stderr)  # the last is the one that fails
            sys.argv = ["sample_ddp.py", *command]
            found = {
                "prepared": None,
                "tuned": [],
                "not tuned": [],
                "evaluated": [],
                "loaded a VAE": False,
            }
            with redirect_stdout(StringIO()) as text:
                sample_ddp.main()
            results.append({"text": text.getvalue(), "ranks": ranks.all_gather_object(found)})
        print(json.dumps(results))
