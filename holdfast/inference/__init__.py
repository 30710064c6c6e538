"""Answers of a trained model: a batch of concurrent requests, the terminal's conversation, and an HTTP server."""
