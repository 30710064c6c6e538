"""A Lightning Trainer. The lines marked `# +` make it resume exactly after any failure."""

import os
import sys

import lightning as L
from mine import LitGPT, loaders

import holdfast.integrations.lightning as hold  # +

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 20
L.seed_everything(7)
model = LitGPT()
trainer = L.Trainer(
    max_steps=steps,
    accumulate_grad_batches=2,
    accelerator="cpu",
    devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
hold.fit(trainer, model, *loaders(), seed=7)  # + instead of trainer.fit(model, *loaders())
