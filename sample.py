"""Sample pictures from a DiT: python sample.py --image-size 512 --labels 207 360

Arguments → engine → picture, in one process. `sample_ddp.py` does the same over many GPUs.
"""

from accel.command_line import OneLineParser, add_arguments, options_from, user_errors

EXAMPLES = """examples:
  python sample.py --image-size 512 --labels "golden retriever" 207    one grid, sample.png
  python sample.py --labels 88 979 --seeds 0 1 2 --output pictures/    one PNG a picture, three seeds
  python sample.py --model DiT-Demo/2 --labels planet                  any machine; weights ship with the code
"""


def main() -> None:
    description = "Sample class-conditional pictures from a diffusion transformer."
    parser = OneLineParser(description=description, epilog=EXAMPLES)
    add_arguments(parser)
    args = parser.parse_args()
    with user_errors(parser):
        options = options_from(args)
        for one in options.for_each_seed():
            one.check_output()
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
        print(f"{', '.join(one.output for one in each)}: {engine.watch}")


if __name__ == "__main__":
    main()
