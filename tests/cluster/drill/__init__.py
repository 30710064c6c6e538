"""The drill: a training undisturbed, then the same one under faults, again and again: each ends with its digest."""
