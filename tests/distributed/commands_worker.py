"""One rank that runs several commands of sample_ddp.py and notes what its network was prepared for and evaluated.

Rank 0 prints JSON: of each command what it printed, and what each rank found.
"""

import json
import sys
from contextlib import nullcontext, redirect_stdout
from io import StringIO

import sample_ddp
from accel import loading
from accel.latents import files
from accel.network import Plain
from accel.parallel import processes

found = {}
prepare, evaluate, load_decoder = loading.load, Plain.forward_blocks, files.load


def prepare_and_note(weights, fit, model, tier, device, batch, **how):
    found["prepared"] = batch.latents * batch.copies
    return prepare(weights, fit, model, tier, device, batch, **how)


def evaluate_and_note(self, h, *how):
    if len(h) not in found["evaluated"]:
        found["evaluated"].append(len(h))
    return evaluate(self, h, *how)


def load_decoder_and_note(*arguments):
    found["loaded a VAE"] = True
    return load_decoder(*arguments)


if __name__ == "__main__":
    loading.load, Plain.forward_blocks, files.load = prepare_and_note, evaluate_and_note, load_decoder_and_note
    results = []
    with processes.launched_job("commands_worker.py") as job:
        processes.launched_job = lambda *_: nullcontext(job)
        for command in json.loads(sys.argv[1]):
            print("sample_ddp.py", *command, file=sys.stderr)  # the last is the one that fails
            sys.argv = ["sample_ddp.py", *command]
            found = {"prepared": None, "evaluated": [], "loaded a VAE": False}
            with redirect_stdout(StringIO()) as text:
                sample_ddp.main()
            results.append({"text": text.getvalue(), "ranks": job.all_gather_object(found)})
        print(json.dumps(results))
