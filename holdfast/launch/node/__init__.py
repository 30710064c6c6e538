"""Node-side processes of a gang: supervision of ranks, capture of their output, and the checkpoint agent."""
