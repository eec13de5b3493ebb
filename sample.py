"""Sample pictures from a DiT: python sample.py --image-size 512 --labels 207 360

Flags → values → picture, in one process, or with --gpus in one a GPU, which do what `sample_ddp.py` does.
"""

import sys

from accel import start

if __name__ == "__main__":
    start.begin()

from accel.command_line import add_arguments, options_from, user_errors
from accel.options import SPEED, GridOptions
from accel.output import require_writable
from sample_ddp import RankParser, sample

EXAMPLES = """examples:
  python sample.py --image-size 512 --labels "golden retriever" 207    one grid, sample.png
  python sample.py --labels 88 979 --seeds 0 1 2 --output pictures/    one PNG a picture, three seeds
  python sample.py --model DiT-Demo/2 --labels planet                  any machine; weights ship with the code
"""


def make_parser() -> RankParser:
    """The flags of a grid."""
    description = "Sample class-conditional pictures from a diffusion transformer."
    parser = RankParser(prog="sample.py", description=description, epilog=EXAMPLES)
    groups = add_arguments(parser, GridOptions)
    groups[SPEED].add_argument("--gpus", **start.GPUS)
    return parser


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    with user_errors(parser):
        options = options_from(args)
        if start.STARTED_HERE:
            return sample(options, parser)
        for one in options.for_each_seed():
            require_writable(one.output, one.output_type)
        if (world := start.world_size(args.gpus, options.device)) > 1:
            sys.exit(start.run(world, parser.prog))
        sample_alone(options)


def sample_alone(options: GridOptions) -> None:
    """The picture, by this process."""
    start.import_torch(options.device)  # after the cheap checks: it is slow
    from accel import door, loading
    from accel.progress import Stopwatch

    watch = Stopwatch(loading.choose_device(options.device))
    with watch.phase("load"):
        opened, run, decoder = door.ready(options)
    print(door.describe(opened.options, run))

    each = opened.options.for_each_seed()
    door.warm_up(each[0], run, watch)
    if decoder:
        decoder.load_ahead()
    latents = [door.sample(one, run, watch) for one in each]
    del run
    loading.free_memory(opened.device)

    for one, of_seed in zip(each, latents, strict=True):
        door.save(one, of_seed, watch, decoder)
    print(f"{', '.join(one.output for one in each)}: {watch} · {start.seconds():.2f} s since start")


if __name__ == "__main__":
    main()
