"""Models of the embedded host and the factories that build them."""
