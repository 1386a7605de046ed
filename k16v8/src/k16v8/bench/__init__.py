"""Speed of kernels: k16v8's, installed libraries', naive ones, on one device in one run.

``shapes`` says what is measured, ``contenders`` (attention) and ``weights`` (products with 4-bit weights) who is,
``timing`` by which clock; ``run`` measures the cells one after
another, checks every output against the definition and writes down what it finds; ``judge`` adds ratios, ``ceilings``
and goals; ``session`` does all of it and keeps the record.

Programs that ``scripts/gpu-session`` runs: ``machine`` (device, driver, versions), ``precompile`` (all kernels, in a
pool of processes), ``serving`` (decode as vLLM calls it), ``sglang`` (SGLang's bench with plug-ins).
"""
