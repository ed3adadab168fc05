"""Import paths of other packages, so that a project can switch by changing one import."""
