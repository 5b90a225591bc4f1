"""For tests of etcdfence, and of what is built on it."""
