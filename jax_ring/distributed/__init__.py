"""Programs of several processes and hosts: who is where, whether they agree, and a launcher for one host."""
