"""A bare training loop with FSDP2. The lines marked `# +` make it resume exactly after any failure."""

import sys

import torch
import torch.distributed as dist
from mine import TinyGPT, rows
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import holdfast  # +

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 100
session = holdfast.session(seed=7)  # +
if session.world_size > 1:
    dist.init_process_group("gloo")
model = TinyGPT()
if session.world_size > 1:
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

start = session.restore(model=model, optimizer=optimizer, schedule=schedule, steps=steps)  # +
for step in range(start, steps):
    inputs, targets = rows(step, session.rank)
    loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    session.step(step + 1, loss=loss, learning_rate=schedule.get_last_lr()[0])  # +
session.export(model)  # +
