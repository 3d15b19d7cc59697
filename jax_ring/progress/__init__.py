"""What a process does at the moment: its steps, and what it says to a launcher when they no longer go on."""
