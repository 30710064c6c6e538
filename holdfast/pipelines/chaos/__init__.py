"""`holdfast chaos`: a spec is trained twice, calm and under faults, and the bits that come out are compared."""
