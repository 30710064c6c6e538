"""Small helpers around the operating system: environment, logging, exits, retries, locks, signals."""
