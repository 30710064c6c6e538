"""The drill: one undisturbed training, then the same training under faults, repeatedly. Each must end with the same
digest."""
