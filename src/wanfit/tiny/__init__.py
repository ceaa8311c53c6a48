"""Tiny random models and files in the layouts that the community publishes, for tests and demonstrations."""
