"""Programs of several processes: host discovery, agreement checks between processes, and the launcher."""
