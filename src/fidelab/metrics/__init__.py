"""Every number that fidelab prints is computed here, once: pure functions over arrays.

``divergence`` compares next-token distributions, ``agreement`` token sequences, ``intervals`` says how sure
an estimate is, ``composite`` turns axis scores into bands and a verdict.  No files, no engines, no settings:
arrays in, frozen records out.  docs/metrics/ defines the numbers; docstrings name its sections.
"""
