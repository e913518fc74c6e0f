"""Robust means: some hostile clients among those of a cluster cannot move its model far.

`rules` has the means, `engine` puts them in the place of a sum, around any other engine.
"""
