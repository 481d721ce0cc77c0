"""Checkpoints that are whole or do not exist: layout, commit, verification, strict restore."""
