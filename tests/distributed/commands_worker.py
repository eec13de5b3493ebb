"""One rank that runs several commands of sample_ddp.py and notes what its engine was prepared for and evaluated.

Rank 0 prints JSON: of each command what it printed, and what each rank found.
"""

import json
import sys
from contextlib import nullcontext, redirect_stdout
from io import StringIO

import sample_ddp
from accel.engine import Engine
from accel.network import PlainDiT
from accel.parallel import processes

found = {}
prepare, evaluate = Engine.__init__, PlainDiT.forward_blocks


def prepare_and_note(self, options, batch_rows=None, *more, **how):
    found["prepared"] = batch_rows
    prepare(self, options, batch_rows, *more, **how)


def evaluate_and_note(self, h, condition, **how):
    if len(h) not in found["evaluated"]:
        found["evaluated"].append(len(h))
    return evaluate(self, h, condition, **how)


if __name__ == "__main__":
    Engine.__init__, PlainDiT.forward_blocks = prepare_and_note, evaluate_and_note
    results = []
    with processes.launched_job("commands_worker.py") as job:
        processes.launched_job = lambda program: nullcontext(job)
        for command in json.loads(sys.argv[1]):
            print("sample_ddp.py", *command, file=sys.stderr)  # the last is the one that fails
            sys.argv = ["sample_ddp.py", *command]
            found = {"prepared": None, "evaluated": []}
            with redirect_stdout(StringIO()) as text:
                sample_ddp.main()
            results.append({"text": text.getvalue(), "ranks": job.all_gather_object(found)})
        print(json.dumps(results))
