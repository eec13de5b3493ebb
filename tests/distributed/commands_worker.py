"""One rank that runs several commands of sample_ddp.py. Rank 0 prints JSON: the text that each
command printed.
"""

import json
import sys
from contextlib import nullcontext, redirect_stdout
from io import StringIO

import sample_ddp
from accel.distributed import launched

if __name__ == "__main__":
    texts = []
    with launched.launched_ranks("commands_worker.py") as ranks:
        launched.launched_ranks = lambda *_: nullcontext(ranks)
        for command in json.loads(sys.argv[1]):
            print("sample_ddp.py", *command, file=sys.stderr)  # the last is the one that fails
            sys.argv = ["sample_ddp.py", *command]
            with redirect_stdout(StringIO()) as text:
                sample_ddp.main()
            texts.append(text.getvalue())
        print(json.dumps(texts))
