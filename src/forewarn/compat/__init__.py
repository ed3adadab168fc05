"""Other packages' import paths, so that a project moves over by changing one import."""
