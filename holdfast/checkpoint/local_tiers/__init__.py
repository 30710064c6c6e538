"""Local tiers: copies of the state in the memory of this node and of another one, and on a disk. They are saved more
often than checkpoints and need no root. A gang continues from them where they are newer than the newest checkpoint."""
