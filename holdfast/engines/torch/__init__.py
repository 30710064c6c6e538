"""The torch engine: one process, DDP or FSDP2."""
