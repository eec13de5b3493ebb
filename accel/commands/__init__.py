"""The commands of a wheel, dit-sample and dit-sample-ddp. sample.py and sample_ddp.py are links to
the programs of a checkout.
"""

from accel import launch


def run_sample() -> None:
    """Run sample.py."""
    launch.begin()  # before slow imports
    from accel.commands.sample import main

    main()


def run_sample_ddp() -> None:
    """Run sample_ddp.py."""
    launch.begin()
    from accel.commands.sample_ddp import main

    main()
