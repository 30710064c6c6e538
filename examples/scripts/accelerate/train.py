"""A loop with Hugging Face accelerate. The lines marked `# +` make it resume exactly after any failure."""

import sys

import torch
from accelerate import Accelerator
from mine import loader, model
from torch.nn.functional import cross_entropy

import holdfast  # +
from holdfast.integrations.accelerate import ResumableBatches  # +

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 20
session = holdfast.session(seed=7)  # +
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
network = model()
optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
network, optimizer, batches, schedule = accelerator.prepare(network, optimizer, loader(), schedule)
batches = ResumableBatches(session, batches)  # +

step = session.restore(model=network, optimizer=optimizer, schedule=schedule, batches=batches, steps=steps)  # +
for points, classes in batches:  # epoch after epoch, without an end
    if step == steps:
        break
    with accelerator.accumulate(network):
        loss = cross_entropy(network(points), classes)
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    if accelerator.sync_gradients:
        step += 1
        session.step(step, loss=loss)  # +
session.export(accelerator.unwrap_model(network))  # +
