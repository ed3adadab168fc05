"""What this version says, does and stores, kept as files: a change of any of it shows in a diff.

`python -m tests.golden.write` writes the text files anew after a deliberate change; read the diff before committing it.
`python -m tests.golden.record` makes the stored runs and the saved state anew. They stand for what users have on disk,
so make them anew only when the format of a run changes on purpose.
"""
