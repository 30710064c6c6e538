"""What only a real API server can say. Skipped where KUBEBUILDER_ASSETS does not name one."""
