"""Gangs on Ray: a launch is one placement group, and each of its nodes runs in an actor."""
