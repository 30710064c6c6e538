"""Launcher over sshd: a file of hosts, and one connection to each machine of a launch."""
