"""Templates that strangers wrote, rendered in a child process with limits on memory and CPU time.

A sandbox of Jinja keeps a template from attributes, and not from memory and time: 21 characters make gigabytes, and
nested loops never end. `process` is the side of the caller; `worker` is the child, which imports nothing but Jinja.
"""
