"""Rewards of answers: built-in checks and functions of user code, in a bounded child process."""
