"""The torch engine: one process, DDP or FSDP2, in torch's own parts."""
