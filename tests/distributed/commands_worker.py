"""sample_ddp.py as it is; each rank leaves in a file what its engine was prepared for and its network evaluated."""

import json
import os
from pathlib import Path

import sample_ddp
from accel.engine import Engine
from accel.network import PlainDiT

found = {"prepared": None, "evaluated": set()}
prepare, evaluate = Engine.__init__, PlainDiT.forward_blocks


def prepare_and_note(self, options, batch_rows=None, *more, **how):
    found["prepared"] = batch_rows
    leave()
    prepare(self, options, batch_rows, *more, **how)


def evaluate_and_note(self, h, condition, **how):
    found["evaluated"].add(len(h))
    leave()
    return evaluate(self, h, condition, **how)


def leave():
    text = json.dumps(found, default=sorted)
    Path(os.environ["FOUND"], f"{os.environ['RANK']}.json").write_text(text)


if __name__ == "__main__":
    Engine.__init__, PlainDiT.forward_blocks = prepare_and_note, evaluate_and_note
    sample_ddp.main()
