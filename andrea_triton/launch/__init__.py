"""From a problem to kernels on a device: configurations, plans, compiling and running."""
