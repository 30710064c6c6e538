"""How a model scores on held-out text, and how the verdict on a model is recorded and found again.

A part, because not only the evaluate step asks: a retraining may be due because the champion scores worse than it did,
and what is registered must be what was judged. Importing it imports no torch.
"""

from holdfast.components.scoring.measured import Measured
from holdfast.components.scoring.verdict import Verdict, key_against, reached_against, settings_key

__all__ = ["Measured", "Verdict", "key_against", "reached_against", "settings_key"]
