"""Tools for users to check the library, and their own changes to it.

`reference` is an oracle written from the published mathematics that shares no code with what it judges; `numerics`
defines all tolerances; `generators` makes inputs on which mistakes show; `parameters` moves flat parameter
dictionaries in and out of modules.
"""
