"""Compile backends of the embedded host: consumers and whole orchestrators as device graphs."""
