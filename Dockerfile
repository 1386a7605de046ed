# fidelab with engine hf on a CPU, from the wheels that `python -m build` made:
#   for package in . checkpoints k16v8; do python -m build --outdir dist $package; done
#   docker build -t fidelab . && docker run --rm -v "$PWD:/work" fidelab compare smollm2-135m --engine hf --kv q8_0 --quick
# scripts/test-wheel runs the RUN lines in an empty environment; they have run in a bare Debian 12 by chroot, too. The image itself has
# not been built yet.
FROM python:3.11-slim
WORKDIR /work
COPY src/fidelab/doctor/constraints.txt /wheels/constraints.txt
COPY dist/*.whl /wheels/
ENV PIP_NO_CACHE_DIR=1 PIP_CONSTRAINT=/wheels/constraints.txt WHEELS=/wheels
# torch first: a build for GPUs is `--build-arg TORCH=...` with the index of that build in PIP_EXTRA_INDEX_URL
ARG TORCH=torch==2.13.0
RUN python -m pip install "$TORCH"
RUN python -m pip install --pre --find-links "$WHEELS" "fidelab[hf,checkpoints]" k16v8
RUN fidelab --version && fidelab doctor
ENTRYPOINT ["fidelab"]
