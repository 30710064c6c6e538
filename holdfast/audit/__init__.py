"""Audits: a segment of a run is trained again on other nodes and compared bit for bit."""
