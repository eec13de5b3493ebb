"""Sample pictures from a DiT: python sample.py --image-size 512 --labels 207 360

Flags → request → settings → picture, in one process. With --gpus, in one process a GPU,
each as in `sample_ddp.py`.
"""

import sys

from accel import start

if __name__ == "__main__":
    start.begin()

from accel.command_line import add_arguments, request_from, user_errors
from accel.output import require_writable
from accel.request import SPEED, GridRequest
from sample_ddp import RankParser, sample

EXAMPLES = """examples:
  python sample.py --image-size 512 --labels "golden retriever" 207  one grid, sample.png
  python sample.py --labels 88 979 --seeds 0 1 2 --output pictures/  one PNG per picture
  python sample.py --model DiT-Demo/2 --labels planet                any machine
"""


def make_parser() -> RankParser:
    description = "Sample class-conditional pictures from a diffusion transformer."
    parser = RankParser(prog="sample.py", description=description, epilog=EXAMPLES)
    groups = add_arguments(parser, GridRequest)
    groups[SPEED].add_argument("--gpus", **start.GPUS)
    return parser


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    with user_errors(parser):
        request = request_from(args)
        if start.STARTED_HERE:
            return sample(request, parser)
        world = start.world_size(args.gpus, request.device)
        for path in request.outputs:
            require_writable(path, request.output_type)
        if world > 1:
            sys.exit(start.run(world, parser.prog))
        sample_alone(request)


def sample_alone(request: GridRequest) -> None:
    """Make the pictures in this process."""
    start.import_torch(request.device)  # after the cheap checks: it is slow
    from accel import door, loading
    from accel.progress import Stopwatch

    watch = Stopwatch(loading.choose_device(request.device))
    with watch.phase("load"):
        settings, run, decoder = door.ready(request)
    print(door.describe(settings, run))

    door.warm_up(settings, run, watch)
    if decoder:
        decoder.load_ahead()
    latents = door.sample(settings, run, watch)  # of each seed
    del run
    loading.free_memory(settings.device)

    for path, of_seed in zip(settings.outputs, latents, strict=True):
        door.save(settings, path, of_seed, watch, decoder)
    print(f"{', '.join(settings.outputs)}: {watch} · {start.seconds():.2f} s since start")


if __name__ == "__main__":
    main()
