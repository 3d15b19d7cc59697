"""Programs of several processes: host discovery, agreement checks between processes, and a launcher for one host."""
