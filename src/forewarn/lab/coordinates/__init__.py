"""How the updates of each layer change with the width of a model: the refined coordinate check over many widths."""
