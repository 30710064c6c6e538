"""The log of a step's pod from KFP, as the recorded server answers: an error is no log, and names of pods count."""

from __future__ import annotations

