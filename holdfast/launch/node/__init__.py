"""What runs on each node of a gang: what supervises its ranks, reads what they print, makes their copies durable."""
