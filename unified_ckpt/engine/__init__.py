"""Scripts over the core, the format and the runtime: save, load, rewrite and repair one folder."""
