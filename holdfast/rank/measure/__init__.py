"""Measurements of a rank: throughput, time per phase, energy, stragglers, profiles and calibration."""
