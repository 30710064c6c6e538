"""The checkpoint agent: a process on each node that makes copies in shared memory durable and commits them. A rank's
interpreter and cores spend no more time on a save than the copy takes."""
