"""Jobs on several hosts: one launcher on each."""
