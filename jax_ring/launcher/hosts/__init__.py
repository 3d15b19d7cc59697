"""The launchers of a job, one on each host: how they find each other, who leads, and which of them take part."""
