"""Training over real sshd."""
