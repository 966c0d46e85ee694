"""Configuration: what a setting is, where its value comes from, and how it is shown."""
