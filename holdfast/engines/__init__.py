"""Training engines behind one interface: one process and gangs with torch, ZeRO with DeepSpeed."""
