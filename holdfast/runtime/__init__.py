"""The process side of a step: environment, arguments, logging, outcomes, exits. Leaves what a spec means to `spec`."""
