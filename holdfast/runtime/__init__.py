"""The process side of a step: environment, arguments, logging, outcomes, exits. `spec` defines the meaning of a
spec."""
