"""Implementations of core attention. Users choose one by name (`implementation="dense"`) instead of importing it."""
