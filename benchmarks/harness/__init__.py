"""What the benchmarks share: the implementations, how they are timed, intervals of confidence, tables and files."""

# Names of the fields with the times of a row.
FIGURES = ("in_loop", "in_waiting_loop", "out_of_place", "in_place")
