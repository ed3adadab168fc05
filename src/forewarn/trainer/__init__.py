"""A small reference trainer, with the models and data of the examples.

Import from the module that holds what you need, so that nothing here loads torch before it is used:
`forewarn.trainer.gpt`, `forewarn.trainer.networks`, `forewarn.trainer.data`.
"""
