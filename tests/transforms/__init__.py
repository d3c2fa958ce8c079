"""The tests of the transforms."""
