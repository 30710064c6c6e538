"""`holdfast chaos`: trains a spec twice, without and with faults, and compares the resulting bits."""
