"""The remedy for a flag of another sampling script: of a family's own repository, or of the
other command here. Imports no torch.
"""

import difflib
from collections.abc import Collection, Sequence

from accel.families import families

OTHER_COMMAND = {
    "global-seed": "use --seed",
    "num-fid-samples": "is sample_ddp.py's, which makes FID jobs; use that under torchrun",
    "per-proc-batch-size": "is sample_ddp.py's, for FID jobs; use --batch-size for a grid",
    "sample-dir": "is sample_ddp.py's, for FID jobs; use --output for a grid",
    "tf32": "use --precision tf32",
    "no-tf32": "use --precision fp32",
    "parallel": "is sample_ddp.py's; --gpus N chooses a layout by itself",
    "gpus": "is sample.py's; torchrun --nproc_per_node=N starts N ranks",
}
STEPS = "use --num-sampling-steps"
# Flags of other programs.
OF_OTHERS = {
    "ema": "use --weights-entry ema; a file's average is sampled by default",
    "use-ema": "use --weights-entry ema; a file's average is sampled by default",
    "raw": "use --weights-entry NAME, such as model",
    "steps": STEPS,
    "num-inference-steps": STEPS,
    "guidance-scale": "use --cfg-scale",
}
# Values of --sampler in other programs.
SAMPLERS = {
    "dopri5": "its steps adapt; use heun or euler with --num-sampling-steps",
    "ode": "use euler or heun",
    "euler-maruyama": "use sde",
    "dpm-solver++": "use dpm++",
}


def remedies() -> dict[str, str]:
    """Return the remedy for every flag, by its name without dashes."""
    of_flags = OTHER_COMMAND | OF_OTHERS
    for family in families():
        of_flags |= family.script_flags
    return of_flags


def remedy(words: Sequence[str], command_flags: Collection[str]) -> str | None:
    """Return the line about the first word that is a flag of another script, or None.

    words: of a command line. command_flags: the flags of the command itself.
    """
    of_flags = remedies()
    if words and words[0] in of_flags:  # a script's first argument, without dashes
        return f"{words[0]}: {of_flags[words[0]]}"
    for word, following in zip(words, [*words[1:], ""]):
        flag, _, value = word.partition("=")
        sampler = (value or following).lower()
        if flag == "--sampler" and sampler in SAMPLERS:
            return f"--sampler {value or following}: {SAMPLERS[sampler]}"
        if flag in command_flags or not flag.startswith("--"):
            continue
        name = flag[2:].replace("_", "-")
        if f"--{name}" in command_flags:
            return f"{flag}: use --{name}"
        if name in of_flags:
            line = of_flags[name]
            here = line.removeprefix("use --")
            if here in OTHER_COMMAND and f"--{here}" not in command_flags:
                line = f"is --{here} here, which {OTHER_COMMAND[here]}"
            return f"{flag}: {line}"
    return None


def nearest(words: Sequence[str], command_flags: Collection[str]) -> str:
    """Return "; did you mean --labels?" for words that no flag took, or ""."""
    flags = (word.partition("=")[0] for word in words if word.startswith("-"))
    for flag in flags:
        near = difflib.get_close_matches(flag, command_flags, 1)
        if near:
            return f"; did you mean {near[0]}?"
    return ""
