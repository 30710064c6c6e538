"""Tests that need a real API server. Skipped where KUBEBUILDER_ASSETS does not name one."""
