"""TRL: supervised fine-tuning, or preferences by DPO. The lines marked `# +` make it resume exactly."""

import sys

from mine import answers, preferences, tiny_model, tokenizer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

import holdfast.integrations.transformers as hold  # +

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 20
settings = {
    "output_dir": "/tmp/out",  # noqa: S108 - Trainer writes nothing there
    "max_steps": steps,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "learning_rate": 3e-3,
    "seed": 7,
    "use_cpu": True,
    "bf16": False,
    "report_to": [],
}
common = {"model": tiny_model(), "processing_class": tokenizer()}
if sys.argv[2:] == ["dpo"]:
    trainer = DPOTrainer(ref_model=tiny_model(), args=DPOConfig(**settings), train_dataset=preferences(), **common)
else:
    trainer = SFTTrainer(args=SFTConfig(**settings), train_dataset=answers(), **common)
hold.train(trainer)  # + instead of trainer.train()
