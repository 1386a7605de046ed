"""Planning: what users wrote → settings with nothing optional left → jobs, one model load per arm, plus the floor."""
