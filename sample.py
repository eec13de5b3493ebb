"""Sample pictures from a DiT: python sample.py --image-size 512 --labels 207 360

Runs in one process, or with --gpus in one process per GPU, each as in `sample_ddp.py`.
"""

import sys

from accel import launch

if __name__ == "__main__":
    launch.begin()

from accel.cli import RankParser, add_arguments, request_from, user_errors
from accel.config.options import GRID, SPEED
from accel.distributed import Ranks
from accel.io.output import require_outputs

EXAMPLES = """examples:
  python sample.py --image-size 512 --labels "golden retriever" 207  one grid, sample.png
  python sample.py --labels 88 979 --seeds 0 1 2 --output pictures/  one PNG per picture
  python sample.py --model DiT-Demo/2 --labels planet                any machine
"""


def make_parser() -> RankParser:
    parser = RankParser(
        description="Sample class-conditional pictures from a diffusion transformer.",
        epilog=EXAMPLES,
    )
    groups = add_arguments(parser, GRID)
    groups[SPEED].add_argument(
        "--gpus",
        type=launch.parse_gpus,
        default=1,
        metavar="N|all",
        help="make the same picture with N processes, one per GPU (of CUDA_VISIBLE_DEVICES); with "
        "--device cpu, N on the CPU (default: 1)",
    )
    return parser


def main() -> None:
    parser = make_parser()
    args = parser.parse_args()
    with user_errors(parser):
        request = request_from(args)
        if launch.IS_GPUS_RANK:
            from accel.commands.sample_ddp import sample  # lazy: only for --gpus

            return sample(request, parser)
        world = launch.world_size(args.gpus, args.device)
        require_outputs(request.values)
        if world > 1:
            from accel.launch.processes import run_ranks

            sys.exit(run_ranks(world, parser.prog))
        launch.import_torch(args.device)  # slow, so after the cheap checks
        from accel.jobs.grid import make_grid

        make_grid(request, Ranks())


if __name__ == "__main__":
    main()
