# make demo   the main job on a real model, from nothing
# make test   the tests of every change: fidelab, its checkpoints, a fast part of k16v8, neither other engines nor pages in a browser
# make test-full   the tests that continuous integration runs as well
# make test-long   all tests of fidelab, checkpoints and k16v8 at full size, with seeds of today
# make test-engines   install llama.cpp, vLLM and SGLang in environments of their own, and run each for real
# make test-browser   install Chromium (Debian's) and playwright, and open the pages in it
# make test-quantize   install llm-compressor, and quantize the embedded model with it; not part of continuous integration
# make golden   run the golden runs again, and print each figure that changed (GOLDEN=--score-only: score them again alone)
# make test-newest   the tests of Transformers' engine, physics and plug-ins with the newest versions, in .venv-newest
# make lock   write anew which versions demo and tests install
# make gallery   four reports for docs/gallery, and their pictures (Chromium, playwright, Pillow)
# make docs   the documentation as a site in build/site, and its reference pages from the code
# make check  ruff and strict mypy
.PHONY: demo test test-full test-long test-engines test-browser test-newest test-quantize golden zoo gallery lock docs check setup clean

RUN := .venv/bin/python -m
# Files of tests that run side by side; a file's tests stay together and share what they set up.  Fast tests often wait
# for a process or a server, so that there may be more of them than cores; engines use all the cores that they get.
WORKERS ?= 3
ENGINE_WORKERS ?= 2
# A process that compiles fidelab anew takes four times as long to start, and tests start many.
unexport PYTHONDONTWRITEBYTECODE

demo: .venv/.ready
	.venv/bin/fidelab compare smollm2-135m --engine hf --dtype float32 --reference f32 --control bf16 \
	  --kv k16v8 --kv fp8_e4m3 --kv q8_0 --kv int4 --axes kld --quick

test: .venv/.ready
	.venv/bin/fidelab setup fetch smollm2-135m
	$(RUN) pytest -m "not engines and not browser and not long and not full" -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test-full: .venv/.ready
	$(RUN) pytest k16v8/tests checkpoints/tests tests -m "full and not engines and not browser and not long" -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test-long: .venv/.ready
	.venv/bin/fidelab setup fetch smollm2-135m
	WORKERS=$(ENGINE_WORKERS) scripts/test-long

test-engines: .venv/.ready
	.venv/bin/fidelab setup fetch smollm2-135m
	WORKERS=$(ENGINE_WORKERS) scripts/test-engines

test-browser: .venv/.ready
	scripts/test-browser

test-newest:
	scripts/test-newest

zoo: .venv/.ready
	.venv/bin/fidelab reproduce zoo
	.venv/bin/python benchmarks/zoo.py

lock:
	scripts/lock

test-quantize: .venv/.ready
	.venv/bin/fidelab setup fetch smollm2-135m
	.venv/bin/fidelab setup install llm-compressor --cpu
	FIDELAB_REQUIRE_TOOLS=1 $(RUN) pytest -m engines tests/real/test_quantize.py

golden: .venv/.ready
	$(RUN) tests.golden.regenerate $(GOLDEN)

gallery: .venv/.ready
	.venv/bin/fidelab setup fetch smollm2-135m
	.venv/bin/python scripts/gallery

docs: .venv/.ready
	$(RUN) fidelab.cli.reference docs/reference
	.venv/bin/python scripts/docs_site.py
	@# not --quiet: mkdocs --strict counts only the warnings that it prints
	NO_MKDOCS_2_WARNING=1 $(RUN) mkdocs build --strict

check: .venv/.ready
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy

setup: .venv/.ready

.venv/.ready: pyproject.toml checkpoints/pyproject.toml k16v8/pyproject.toml scripts/setup src/fidelab/doctor/constraints.txt
	scripts/setup

clean:
	rm -rf .venv build dist
