"""Collectives across hosts: an engine within each host, XLA between hosts."""
