"""What suites share when they measure: calls and their inputs, compiling, work."""
