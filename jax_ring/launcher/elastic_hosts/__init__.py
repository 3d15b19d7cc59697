"""Jobs on several hosts that come and go: one launcher on each, of which any may lead."""
