"""One module per command, each with a `command` that imports what it needs when it runs.

`terminal` and `verdict` are what the commands share.
"""
