"""Elastic jobs: who is a member, and what happens to those that are not."""
