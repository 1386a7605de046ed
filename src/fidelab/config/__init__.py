"""Settings of users: an experiment as YAML or flags, validated. An unknown key is an error that names its place."""
