"""Which processes of a job no longer go on, as the launcher sees it."""
