"""Rendering of untrusted templates in a child process with limits on memory and CPU time.

Jinja's sandbox restricts a template's attributes, but not its memory and time: 21 characters make gigabytes, and nested
loops never end. `process` is the caller's side. `worker` is the child, which imports only Jinja.
"""
