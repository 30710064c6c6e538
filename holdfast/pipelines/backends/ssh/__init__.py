"""Several machines that sshd alone connects: the DAG runs here, and the gang trains there."""
