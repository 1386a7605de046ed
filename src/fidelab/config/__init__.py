"""What users may write: an experiment as YAML or flags, validated; an unknown key is an error that names its place."""
