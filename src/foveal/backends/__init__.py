"""Implementations of the ops. Users name them (`implementation="dense"`), and never import them."""
