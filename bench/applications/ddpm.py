"""Ancestral sampling of a diffusion model (Ho et al., 2020) with diffusers, as its documentation writes the loop."""

import torch
from diffusers import DDPMScheduler, UNet2DModel

WHAT = "DDPM sampler, diffusers"
STEPS = {"cpu": 60, "cuda": 1000}


def run(jit, device, steps, tick):
    model = UNet2DModel(
        sample_size=32, block_out_channels=(32, 64, 64), layers_per_block=1, norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
    ).to(device).eval()  # fmt: skip
    model = jit(model)
    scheduler = DDPMScheduler(num_train_timesteps=1000)
    scheduler.set_timesteps(steps)
    image = torch.randn(1, 3, 32, 32, device=device)
    for t in scheduler.timesteps:
        with torch.no_grad():
            residual = model(image, t).sample
        image = scheduler.step(residual, t, image).prev_sample
        tick()
    return {"image": image}
