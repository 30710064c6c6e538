"""A Hugging Face Trainer. The lines marked `# +` make it resume exactly after any failure."""

import sys

from mine import Sequences, masked, tiny_model
from transformers import Trainer, TrainingArguments

import holdfast.integrations.transformers as hold  # +

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 20
arguments = TrainingArguments(
    "/tmp/out",  # noqa: S108 - Trainer writes nothing there
    max_steps=steps,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    learning_rate=3e-3,
    seed=7,
    use_cpu=True,
    report_to=[],
)
trainer = Trainer(model=tiny_model(), args=arguments, train_dataset=Sequences(), data_collator=masked)
hold.train(trainer)  # + instead of trainer.train()
