"""What the benchmarks share: the implementations, how they are timed, intervals of confidence, tables and files."""

# The times of a row, by the names of its fields.
FIGURES = ("in_loop", "in_waiting_loop", "out_of_place", "in_place")
