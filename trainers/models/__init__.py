"""Students: presets built from a configuration, folders and hub models with weights."""
