"""The tests of hetero. `tests/support` has what several test modules use."""
