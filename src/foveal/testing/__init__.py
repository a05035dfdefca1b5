"""Shipped with the library so that users can check it, and their own changes, themselves.

`reference` is an oracle written from the published mathematics that shares no code with what it judges; `numerics`
is the one home of tolerances; `generators` makes inputs on which mistakes show; `parameters` moves flat parameter
dictionaries in and out of modules.
"""
