"""Metadata, attention interfaces and custom ops of the embedded host."""
