"""K16/V8 inside other engines, through their own hooks: a folder for each; ``shared`` has the common parts."""
