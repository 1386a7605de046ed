"""Workers: one fresh process per arm, and the typed messages between it and its parent.

``child`` runs inside the engine's environment (standard library and numpy only, plus the engine);
``parent`` spawns it, enforces the deadline, ends the process group and waits until its memory is free again.
"""
