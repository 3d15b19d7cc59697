"""Passes over a lowered shard_map or program: calls are joined, named, awaited, and done in place."""
