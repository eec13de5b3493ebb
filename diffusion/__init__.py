"""DiT's Gaussian diffusion process: schedules, samplers and training losses for any network."""

from . import gaussian_diffusion as gd
from .respace import SpacedDiffusion, space_timesteps


def create_diffusion(
    timestep_respacing: str | list[int] | None,
    noise_schedule: str = "linear",
    use_kl: bool = False,
    sigma_small: bool = False,
    predict_xstart: bool = False,
    learn_sigma: bool = True,
    rescale_learned_sigmas: bool = False,
    diffusion_steps: int = 1000,
) -> SpacedDiffusion:
    """Make the process for training DiT (all steps) or sampling from it (`"250"`, `"ddim50"`).

    timestep_respacing: "250", "10,15,20", "ddim50" or a list, see `space_timesteps`;
    "" or None: every step. noise_schedule: "linear" or "squaredcos_cap_v2". use_kl: train
    only on the variational bound. rescale_learned_sigmas: weight the bound's term by
    steps / 1000. sigma_small: without learned sigma, use the posterior's variance instead
    of beta. predict_xstart: the model predicts x_0 instead of the noise. diffusion_steps:
    length of the trained process. Raises ValueError for an unknown schedule and for an
    impossible respacing.
    """
    betas = gd.get_named_beta_schedule(noise_schedule, diffusion_steps)
    if use_kl:
        loss_type = gd.LossType.RESCALED_KL
    elif rescale_learned_sigmas:
        loss_type = gd.LossType.RESCALED_MSE
    else:
        loss_type = gd.LossType.MSE
    if learn_sigma:
        var_type = gd.ModelVarType.LEARNED_RANGE
    else:
        var_type = gd.ModelVarType.FIXED_SMALL if sigma_small else gd.ModelVarType.FIXED_LARGE
    respacing: str | list[int] = [diffusion_steps]  # every step
    if timestep_respacing is not None and timestep_respacing != "":
        respacing = timestep_respacing
    return SpacedDiffusion(
        use_timesteps=space_timesteps(diffusion_steps, respacing),
        betas=betas,
        model_mean_type=gd.ModelMeanType.START_X if predict_xstart else gd.ModelMeanType.EPSILON,
        model_var_type=var_type,
        loss_type=loss_type,
    )
