"""Configuration of an installation: settings, hardware catalogue, and the reader of YAML and JSON."""
