"""The parameter layout of ZeRO: each rank owns whole parameters."""
