"""Sample pictures from a DiT: python sample.py --image-size 512 --labels 207 360

Flags → request → settings → picture, in one process. With --gpus, in one process a GPU,
each as in `sample_ddp.py`.
"""

import sys

from accel import launch

if __name__ == "__main__":
    launch.begin()

from accel.command_line import add_arguments, request_from, user_errors
from accel.driver import import_torch
from accel.ranks import Ranks
from accel.request import SPEED, GridRequest
from sample_ddp import RankParser, require_outputs, sample

EXAMPLES = """examples:
  python sample.py --image-size 512 --labels "golden retriever" 207  one grid, sample.png
  python sample.py --labels 88 979 --seeds 0 1 2 --output pictures/  one PNG per picture
  python sample.py --model DiT-Demo/2 --labels planet                any machine
"""


def make_parser() -> RankParser:
    description = "Sample class-conditional pictures from a diffusion transformer."
    parser = RankParser(prog="sample.py", description=description, epilog=EXAMPLES)
    groups = add_arguments(parser, GridRequest)
    groups[SPEED].add_argument("--gpus", **launch.GPUS)
    return parser


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    with user_errors(parser):
        request = request_from(args)
        if launch.STARTED_HERE:
            return sample(request, parser)
        world = launch.world_size(args.gpus, request.device)
        require_outputs(request)
        if world > 1:
            sys.exit(launch.run_ranks(world, parser.prog))
        sample_alone(request)


def sample_alone(request: GridRequest) -> None:
    """Make the pictures in this process."""
    import_torch(request.device)  # after the cheap checks: it is slow
    from accel.grid import make_grid

    make_grid(request, Ranks())


if __name__ == "__main__":
    main()
