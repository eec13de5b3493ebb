"""Sample pictures from a DiT: python sample.py --image-size 512 --labels 207 360

Arguments → engine → picture, in one process. `sample_ddp.py` does the same over many GPUs.
"""

from accel.command_line import OneLineParser, add_arguments, options_from, user_errors


def main() -> None:
    parser = OneLineParser(description="Sample class-conditional pictures from a diffusion transformer.")
    add_arguments(parser)
    args = parser.parse_args()
    with user_errors(parser):
        options = options_from(args)
        options.check_output()
        from accel.engine import Engine  # after the cheap checks: torch is slow to import

        engine = Engine(options)
        print(engine.describe())
        latents = engine.sample()
        engine.release_network()
        engine.save(latents)
        print(f"{options.output}: {engine.watch}")


if __name__ == "__main__":
    main()
