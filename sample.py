"""Sample pictures from a DiT: python sample.py --image-size 512 --labels 207 360

Arguments → engine → picture, in one process, or with --gpus in one a GPU, which do what `sample_ddp.py` does.
"""

import sys

from accel import start
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
        if start.STARTED_HERE:
            return sample(options_from(args), parser)
        options = options_from(args)
        for one in options.for_each_seed():
            require_writable(one.output, one.output_type)
        if (world := start.world_size(args.gpus, options.device)) > 1:
            sys.exit(start.run(world, parser.prog))
        from accel.engine import Engine  # after the cheap checks: torch is slow to import

        engine = Engine(options)
        print(engine.describe())
        each, latents = engine.options.for_each_seed(), []
        for one in each:
            engine.reconfigure(one)
            latents.append(engine.sample())
        engine.release_network()
        for one, of_seed in zip(each, latents, strict=True):
            engine.reconfigure(one)
            engine.save(of_seed)
        print(f"{', '.join(one.output for one in each)}: {engine.watch} · {start.seconds():.2f} s since start")


if __name__ == "__main__":
    main()
