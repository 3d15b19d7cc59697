"""Lowers the primitives to HLO: to custom calls of an engine, or to XLA's collectives where no engine serves a call."""
