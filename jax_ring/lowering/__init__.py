"""From a primitive to HLO: who serves a call, the custom call to an engine, and XLA's collectives where it has none."""
