"""What flags of other repositories' sampling scripts are called here. Imports no torch.

The scripts are SiT's sample.py and sample_ddp.py, REPA's generate.py and LightningDiT's
inference.py, whose options stand in a configuration; and the other command of this
repository.
"""

import difflib
from collections.abc import Collection, Sequence

WEIGHTS_SAY = "the weights say it; drop it"
FIXED = "euler and heun take --num-sampling-steps even steps; drop it"
SDE = "sde computes SiT's default, form sigma and a last step of 0.04; drop it"
EVALUATE = "python -m scripts.fid compares pictures with a reference; drop it"
MODES = {
    "ODE": "use --sampler euler or --sampler heun",
    "SDE": "use --sampler sde",
}
FLAGS = {
    # SiT
    "path-type": f"only the linear path is sampled, and {WEIGHTS_SAY}",
    "prediction": f"--model names the family, else {WEIGHTS_SAY}",
    "loss-weight": "is for training; drop it",
    "train-eps": "is for training; drop it",
    "sample-eps": "is 0 for the linear path; drop it",
    "sampling-method": "use --sampler: euler, heun or sde",
    "atol": FIXED,
    "rtol": FIXED,
    "reverse": "only sampling is computed, not its reverse; drop it",
    "likelihood": "only sampling is computed, no likelihood; drop it",
    "diffusion-form": SDE,
    "diffusion-norm": SDE,
    "last-step": SDE,
    "last-step-size": SDE,
    # REPA
    "mode": "use --sampler: sde, or euler or heun for an ode",
    "heun": "use --sampler heun",
    "no-heun": "use --sampler euler",
    "num-steps": "use --num-sampling-steps",
    "guidance-low": "use --guidance-interval LOW HIGH",
    "guidance-high": "use --guidance-interval LOW HIGH",
    "resolution": "use --image-size",
    "encoder-depth": WEIGHTS_SAY,
    "projector-embed-dims": WEIGHTS_SAY,
    "qk-norm": WEIGHTS_SAY,
    "no-qk-norm": WEIGHTS_SAY,
    "legacy": WEIGHTS_SAY,
    "fused-attn": "--precision chooses the kernels; drop it",
    "no-fused-attn": "--precision chooses the kernels; drop it",
    "compute-metrics": EVALUATE,
    "fid-statistics": EVALUATE,
    "fid-statistics-file": EVALUATE,
    "fid-reference-file": EVALUATE,
    # LightningDiT
    "config": "use --ckpt FILE, and put the configuration beside it as FILE's name with .yaml",
    "demo": "sample.py makes one grid; drop it",
    "ckpt-path": "use --ckpt",
    "model-type": "use --model LightningDiT-…",
    "cfg-interval-start": "use --guidance-interval 0 HIGH, where HIGH is 1 less the start",
    "fid-num": "use --num-fid-samples of sample_ddp.py",
    # this repository's other command
    "global-seed": "use --seed",
    "num-fid-samples": "is sample_ddp.py's, which makes FID jobs; use that under torchrun",
    "per-proc-batch-size": "is sample_ddp.py's, for FID jobs; use --batch-size for a grid",
    "sample-dir": "is sample_ddp.py's, for FID jobs; use --output for a grid",
    "tf32": "use --precision tf32",
    "no-tf32": "use --precision fp32",
    "parallel": "is sample_ddp.py's; --gpus N chooses a layout by itself",
    "gpus": "is sample.py's; torchrun --nproc_per_node=N starts N ranks",
}


def remedy(words: Sequence[str], own: Collection[str]) -> str | None:
    """Return the line about the first word that is a flag of another script, or None.

    words: of a command line. own: the flags of the command itself.
    """
    if words and words[0] in MODES:
        return f"{words[0]}: {MODES[words[0]]}"
    for word in words:
        flag = word.partition("=")[0]
        if flag in own or not flag.startswith("--"):
            continue
        name = flag[2:].replace("_", "-")
        if f"--{name}" in own:
            return f"{flag}: use --{name}"
        if name in FLAGS:
            return f"{flag}: {FLAGS[name]}"
    return None


def nearest(words: Sequence[str], own: Collection[str]) -> str:
    """Return "; did you mean --labels?" for words that no flag took, or ""."""
    flags = (word.partition("=")[0] for word in words if word.startswith("-"))
    for flag in flags:
        if near := difflib.get_close_matches(flag, own, 1):
            return f"; did you mean {near[0]}?"
    return ""
